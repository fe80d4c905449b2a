# SPDX-License-Identifier: Apache-2.0
"""A machine of driver mode: the real agent, with modelled processes and a memory of its own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.agent.agent import Agent, AgentPorts, AgentSettings
from holdfast.agent.group import Program
from holdfast.agent.processes import RunMode
from holdfast.agent.vault.vault import Vault
from holdfast.core.job.membership.admission import rules_of
from holdfast.core.node.environment import Launch
from holdfast.model.checkpoint import Version
from holdfast.model.errors import HoldfastError
from holdfast.runtime.observe import Details, Level
from holdfast.sim.keeping import MachineArena
from holdfast.sim.loop import Process
from holdfast.sim.ports import UnheldPort
from holdfast.sim.program import ModelledProcesses, ModelledWorker
from holdfast.sim.scenario import Fault, Scenario

if TYPE_CHECKING:
    from holdfast.sim.drivers import Drivers

JOB = "simulated"
MASTER = ("master", 1)
GRACE_S = 2.0
FIRST_CONTACT_S = 600.0


class Node:
    """One agent process, from its start to its end."""

    def __init__(
        self,
        drivers: "Drivers",
        place: str,
        number: int,
        node_id: int,
        ended: Callable[["Node", int, bool], None],
    ) -> None:
        """`number` tells the agent processes of a place apart. `ended` is called with the exit
        code, and with whether the machine is still there to report it."""
        self.place = place
        self.process = Process(place)
        self._drivers = drivers
        self._number = number
        self._node_id = node_id
        self._ended = ended
        self._rng = Random(f"{drivers.scenario.seed} {place} {number}")
        self._processes: ModelledProcesses | None = None
        self._arena: MachineArena | None = None
        self._agent: Agent | None = None
        self.process.run(drivers.loop.create_task, self._live())

    async def _live(self) -> None:
        ports = AgentPorts(
            make_processes=self._make_processes,
            make_vault=partial(
                Vault,
                make_arena=self._make_arena,
                make_disk=None,
                open_storage=self._drivers.open_storage,
            ),
            reserve_port=UnheldPort,
            monotonic=self._drivers.loop.time,
            uniform=self._rng.uniform,
        )
        folder = self._drivers.folder / f"{self.place}-{self._number}"
        settings = _settings(
            self._drivers.scenario, self._drivers.job.token, self.place, folder, self._node_id
        )
        self._agent = Agent(settings, self._say, ports)
        try:
            code = (await self._agent.run()).exit_code
        except HoldfastError as exc:
            self._say(f"fails: {exc}")
            code = 1
        self._drivers.clock.after(0.0, partial(self.end, code, is_told=True))

    def _make_processes(self, **callbacks: object) -> ModelledProcesses:
        self._processes = ModelledProcesses(
            job=self._drivers.job,
            place=self.place,
            number=self._number,
            rng=self._rng,
            **callbacks,  # type: ignore[arg-type]
        )
        return self._processes

    def _make_arena(self, _token: bytes) -> MachineArena:
        memory = self._drivers.memory_of(self.place)
        self._arena = MachineArena(memory, self._number, self.process)
        return self._arena

    def _say(self, text: str | Details, level: Level = Level.INFO, /) -> None:
        if self.process.is_alive and level > Level.DEBUG:
            self._drivers.say(f"{self.place} {text}")

    def _workers(self) -> tuple[ModelledWorker, ...]:
        return () if self._processes is None else self._processes.workers

    # ---- what happens to it ---------------------------------------------------------------------

    def hurt_worker(self, fault: Fault) -> None:
        """A fault hits the first worker, if there is one."""
        for worker in self._workers()[:1]:
            self.process.run(partial(worker.hurt, fault.kind, fault.seconds))

    def rot(self) -> Version | None:
        """A byte in its memory flips; returns its version, or None if there was no byte."""
        return None if self._arena is None else self._arena.rot()

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.run(self._shut_down)

    def _shut_down(self) -> None:
        if self._agent is not None:
            self._agent.shut_down("it was told to go", 143)

    def kill(self) -> None:
        """SIGKILL: its workers die with it, its memory stays on the machine."""
        self.end(-9, is_told=True)

    def end(self, code: int, *, is_told: bool) -> None:
        """Its process is over; `is_told`: its machine is still there to report it."""
        if self.process.is_alive:
            self._drivers.say(f"{self.place} ends with {code}")
            self.cease(is_told=is_told)
            self._ended(self, code, is_told)

    def cease(self, *, is_told: bool) -> None:
        """Stop all that it runs; only its memory and its disks remain."""
        self.process.end()
        self._drivers.wires.process_ended(self.process, is_told=is_told)
        for worker in self._workers():
            worker.cease()
        if self._arena is not None:
            self._arena.killed()


def _settings(
    scenario: Scenario, token: bytes, place: str, folder: Path, node_id: int
) -> AgentSettings:
    """What an agent is told when it starts."""
    launch = Launch(
        nproc=scenario.nproc,
        role="default",
        run_id=JOB,
        max_restarts=scenario.max_restarts,
        socket=f"{place}:1",
        token_file="",
        signals_to_handle="",
    )
    program = Program(
        argv=("train.py",),
        mode=RunMode.SCRIPT,
        launch=launch,
        env={},
        log_dir=folder,
        console=lambda local_rank, is_error: None,
    )
    return AgentSettings(
        master="{}:{}".format(*MASTER),
        token=token,
        tls=None,
        rules=replace(rules_of(scenario.spec()), max_restarts=scenario.max_restarts),
        program=program,
        # No node reaches another node's memory: the byte service has sockets and threads.
        host="",
        node_rank=-1,
        node_id=node_id,
        topology="",
        runtime_dir=folder,
        grace_s=GRACE_S,
        spares=False,
        excluded_roots=(),
        first_contact_s=FIRST_CONTACT_S,
    )
