# SPDX-License-Identifier: Apache-2.0
"""One life of the real master in driver mode, connected as master/process.py does it."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from holdfast.core.job import events as ev
from holdfast.core.kernel import Event
from holdfast.master.process import Engine, build_engine, replayed, take_plans, watch_platform
from holdfast.runtime.observe import Details, Level
from holdfast.runtime.transport import listen
from holdfast.sim.driver_node import JOB, MASTER
from holdfast.sim.loop import Process
from holdfast.sim.ports import DeskPort, Disk, PlatformPort

if TYPE_CHECKING:
    from holdfast.sim.drivers import Drivers

WALL_S = 1_700_000_000.0
"""The wall clock when a simulation begins."""

_TELLING = (
    *(ev.RestoreAgreed, ev.NodeLost, ev.GenerationRaised, ev.WorldHurt),
    *(ev.WorldFormed, ev.AttemptOpened, ev.PlanSettled),
)
"""The facts that the checkers hear of."""


class Master:
    """A master process."""

    def __init__(self, drivers: "Drivers", disk: Disk, number: int) -> None:
        self.process = Process(MASTER[0])
        self._engine: Engine | None = None
        self._drivers = drivers
        self._disk = disk
        self._number = number
        self.process.run(drivers.loop.create_task, self._live())

    async def _live(self) -> None:
        drivers = self._drivers
        engine = self._engine = build_engine(
            JOB,
            drivers.scenario.spec(),
            self._disk,
            self._say,
            monotonic=drivers.loop.time,
            clock_name="simulated",
            wall=lambda: WALL_S + drivers.loop.time(),
            watch=self._watch,
        )
        engine.core.core.check_every_step()
        await listen("{}:{}".format(*MASTER), engine.service, drivers.job.token)
        if drivers.scenario.managed:
            desk, platform = DeskPort(drivers.desk), PlatformPort(drivers.platform)
            engine.service.use_desk(desk)
            drivers.loop.create_task(take_plans(desk, engine.driver))
            engine.service.use_platform(platform)
            drivers.loop.create_task(watch_platform(platform, engine.driver))
        engine.start(f"m{self._number}")
        ends = (engine.service.finished, engine.fatal)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await engine.driver.drain()
        if engine.service.finished.done():
            drivers.checkers.plans.check_end(engine.core.nodes.wanted()["nodes"])
            drivers.over.set()
        else:
            self._say(f"stops: {engine.fatal.exception()}")
            drivers.clock.after(0.0, partial(drivers.kill_master, drivers.rng.uniform(1.0, 5.0)))

    def _watch(self, event: Event) -> None:
        if self.process.is_alive and isinstance(event, _TELLING):
            self._drivers.checkers.durable((), (event,))

    def _say(self, text: str | Details, level: Level = Level.INFO, /) -> None:
        if self.process.is_alive and level > Level.DEBUG:
            self._drivers.say(f"master {text}")

    async def come_to_rest(self) -> None:
        """Wait until everything is on the disk; a replay must give the state in memory."""
        if self._engine is None:
            return
        await self._engine.driver.drain()
        if self.process.is_alive and not self._engine.fatal.done():
            entries = self._disk.load()
            again = replayed(JOB, self._drivers.scenario.spec(), entries)
            self._drivers.checkers.replay_is_exact(self._engine.core, again)

    def kill(self) -> Disk:
        """Kill it between any two callbacks; returns the disk that the next master finds."""
        self.process.end()
        if self._engine is not None:
            self._engine.driver.stop()
        self._drivers.wires.process_ended(self.process, is_told=True)
        return self._disk.taken_over()
