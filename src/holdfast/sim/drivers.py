# SPDX-License-Identifier: Apache-2.0
"""Driver mode: the real master and the real agents, as asyncio programs, in virtual time.

Core mode (sim/run.py) models the drivers; this runs them: the loop around the core, the service,
links with their handshake and frames, the agent with its stream, relay, beats and worker groups.
Modelled are the bytes' way (sim/wires.py), the journal, the platform and the workers.
"""

import asyncio
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from msgspec.structs import replace

from holdfast.agent.agent import Agent, AgentPorts, AgentSettings
from holdfast.agent.group import Program
from holdfast.agent.processes import RunMode
from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.admission import rules_of
from holdfast.core.job.records import decode_record
from holdfast.core.node.environment import Launch
from holdfast.master.process import Engine, build_engine, replayed, watch_platform
from holdfast.model.errors import HoldfastError
from holdfast.model.ids import NodeId, NodeRank
from holdfast.ports.journal import Entry
from holdfast.runtime.transport import listen
from holdfast.sim import platform as model
from holdfast.sim.checkers import Checkers, Violation
from holdfast.sim.history import History
from holdfast.sim.loop import Process, VirtualLoop
from holdfast.sim.network import DOWN, UP, Network
from holdfast.sim.ports import Disk, PlatformPort, UnheldPort
from holdfast.sim.program import Job, ModelledProcesses, ModelledWorker
from holdfast.sim.scenario import Fault, Scenario
from holdfast.sim.wires import Wires

JOB = "simulated"
MASTER = ("master", 1)
WALL_S = 1_700_000_000.0
"""The wall clock when a simulation begins."""

GRACE_S = 2.0
FIRST_CONTACT_S = 600.0

PATIENCE_S = 1500.0
"""How long after the last fault the job must have come to its end."""

_WAYS = {"partition": (UP, DOWN), "partition_up": (UP,), "partition_down": (DOWN,)}

FAULTS = (
    *("kill_worker", "crash_worker", "stop_worker"),
    *("kill_agent", "lose_node", "preempt_node"),
    *("break_stream", "slow_link", "partition", "partition_up", "partition_down", "cut_rack"),
    *("kill_master", "slow_disk", "full_disk", "fail_launch", "slow_launches"),
    # What the drivers are there for goes wrong more often.
    *("kill_master", "break_stream", "half_open"),
)
"""What goes wrong: as in core mode, but there are no checkpoints here."""

_AT_MOST = {"crash_worker": 3, "fail_launch": 2, "lose_node": 3}
"""Within what is forgiven, so that every job must come to its end."""


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed: a job of two to four nodes, and a few kinds of trouble."""
    rng = Random(f"drivers {seed}")
    nodes, steps, step_s = rng.randint(2, 4), rng.randint(15, 30), rng.choice((0.3, 1.0))
    kinds = rng.sample(FAULTS, rng.randint(2, 5))
    faults: list[Fault] = []
    for _ in range(rng.randint(2, 8)):
        kind = rng.choice(kinds)
        at = rng.uniform(0.0, 5.0 + steps * step_s)
        if faults and rng.random() < 0.5:
            at = faults[-1].at + rng.choice((0.02, 0.5, 8.0)) * rng.random()
        lasting = rng.choice((0.1, 1.0, 5.0, 10.0, 30.0)) * rng.uniform(0.5, 1.5)
        if sum(fault.kind == kind for fault in faults) < _AT_MOST.get(kind, 8):
            faults.append(Fault(round(at, 3), kind, rng.randrange(16), round(lasting, 3)))
    return Scenario(
        seed=seed,
        nodes=nodes,
        min_nodes=rng.randint(1, nodes),
        spares=rng.choice((0, 0, 1)),
        nproc=rng.choice((1, 1, 2)),
        managed=rng.random() < 0.5,
        steps=steps,
        step_s=step_s,
        lease_s=rng.choice((8.0, 20.0)),
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    problem: str
    """What must never happen and did; empty if all is well."""
    digest: str
    """A hash over everything that happened."""
    seconds: float
    rounds: int
    counted: int
    """Requests of workers that went to the master and back."""
    lines: list[str]


class _Node:
    """A machine with a real agent."""

    def __init__(self, drivers: "Drivers", place: str, number: int, node_id: int, rank: int):
        """`number` tells the agent processes of a place apart."""
        self.place = place
        self.process = Process(place)
        self._drivers = drivers
        self._number = number
        self._rng = Random(f"{drivers.scenario.seed} {place} {number}")
        self._processes: ModelledProcesses | None = None
        self._settings = drivers.agent_settings(place, number, node_id, rank)
        self.agent: Agent | None = None
        self.process.run(drivers.loop.create_task, self._live())

    async def _live(self) -> None:
        ports = AgentPorts(
            make_processes=self._make_processes,
            reserve_port=UnheldPort,
            monotonic=self._drivers.loop.time,
            uniform=self._rng.uniform,
        )
        self.agent = Agent(self._settings, self._say, ports)
        try:
            code = (await self.agent.run()).exit_code
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

    def _say(self, text: str) -> None:
        if self.process.is_alive:
            self._drivers.history.note(f"{self.place} {text}")

    def _workers(self) -> tuple[ModelledWorker, ...]:
        return () if self._processes is None else self._processes.workers

    def hurt_worker(self, fault: Fault) -> None:
        """Something happens to the first worker, if there is one."""
        for worker in self._workers()[:1]:
            self.process.run(partial(worker.hurt, fault.kind, fault.seconds))

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.run(self._shut_down)

    def _shut_down(self) -> None:
        if self.agent is not None:
            self.agent.shut_down("it was told to go", 143)

    def kill(self) -> None:
        """SIGKILL: its workers go with it."""
        self.end(-9, is_told=True)

    def end(self, code: int, *, is_told: bool) -> None:
        """Its process is over; `is_told`: its machine is there to say so."""
        if self.process.is_alive:
            self._drivers.history.note(f"{self.place} ends with {code}")
            self.process.end()
            self._drivers.wires.process_ended(self.process, is_told=is_told)
            for worker in self._workers():
                worker.cease()
            self._drivers.node_ended(self, code, is_seen=is_told)


class _Master:
    """One life of the real master, wired as master/process.py does it."""

    def __init__(self, drivers: "Drivers", disk: Disk, number: int) -> None:
        self.process = Process(MASTER[0])
        self.engine: Engine | None = None
        self._drivers = drivers
        self._disk = disk
        self._number = number
        self.process.run(drivers.loop.create_task, self._live())

    async def _live(self) -> None:
        drivers = self._drivers
        engine = self.engine = build_engine(
            JOB,
            drivers.scenario.spec(),
            self._disk,
            self._say,
            monotonic=drivers.loop.time,
            wall=lambda: WALL_S + drivers.loop.time(),
        )
        await listen("{}:{}".format(*MASTER), engine.service, drivers.job.token)
        if drivers.scenario.managed:
            platform = PlatformPort(drivers.platform)
            engine.service.use_platform(platform)
            drivers.loop.create_task(watch_platform(platform, engine.driver))
        engine.driver.feed(ev.MasterStarted(nonce=f"m{self._number}"))
        ends = (engine.service.finished, engine.fatal)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await engine.driver.drain()
        if engine.service.finished.done():
            drivers.over.set()
        else:
            self._say(f"stops: {engine.fatal.exception()}")
            drivers.clock.after(0.0, partial(drivers.kill_master, drivers.rng.uniform(1.0, 5.0)))

    def _say(self, text: str) -> None:
        if self.process.is_alive:
            self._drivers.history.note(f"master {text}")

    async def come_to_rest(self) -> None:
        """Wait until everything is on the disk, where it must be as it is in memory."""
        if self.engine is None:
            return
        await self.engine.driver.drain()
        if self.process.is_alive and not self.engine.fatal.done():
            entries = self._disk.load()
            again = replayed(JOB, self._drivers.scenario.spec(), entries)
            self._drivers.checkers.replay_is_exact(self.engine.core, again)

    def kill(self) -> Disk:
        """It dies between any two callbacks; what the next one finds is returned."""
        self.process.end()
        if self.engine is not None:
            self.engine.driver.stop()
        self._drivers.wires.process_ended(self.process, is_told=True)
        return self._disk.taken_over()


class _Watchful(Checkers):
    """Remembers the first problem, should a driver swallow its error."""

    problem = ""

    def fail(self, what: str) -> None:
        self.problem = self.problem or what
        super().fail(what)

    def check_end_of_job(self) -> None:
        """It must have come to a good end: no seed has more failures than are forgiven."""
        if self.end is None:
            self.fail("the job does not come to its end")
        elif not self.end.ok:
            self.fail(f"the job failed: {self.end.reason}")


class Drivers:
    """A scenario on its way."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self._folder = folder
        self.rng = Random(f"{scenario.seed} drivers")
        self.loop = VirtualLoop(self._work_s)
        self.clock = self.loop.clock
        self.history = History(self.clock)
        self.checkers = _Watchful(scenario, self.history)
        self.network = Network(self.clock, Random(f"{scenario.seed} network"))
        self.wires = Wires(self.loop, self.network, Random(f"{scenario.seed} wires"))
        self.loop.streams = self.wires
        self.platform = model.Platform(self.clock, Random(f"{scenario.seed} platform"))
        self.platform.use(self._start_ordered)
        self.job = Job(scenario, self.checkers, secrets.token_hex(16).encode())
        self.over = asyncio.Event()
        self._slow_until = self._full_until = 0.0
        #: Faults that wait for the next write of the journal.
        self._lurking: list[Fault] = []
        self._master: _Master | None = None
        self._masters = 0
        #: The living nodes, by machine.
        self._nodes: dict[str, _Node] = {}
        self._started = 0

    def run(self) -> Result:
        problem = ""
        try:
            self.loop.run(self._main())
            self.checkers.check_end_of_job()
        except (Violation, RuntimeError) as exc:
            problem = str(exc)
        return Result(
            self.checkers.problem or next(iter(self.loop.surprises), "") or problem,
            self.history.digest(),
            self.clock.now,
            self.checkers.rounds,
            self.job.counted,
            self.history.lines,
        )

    async def _main(self) -> None:
        self._start_master(Disk(is_full=self._is_disk_full, written=self._durable))
        if not self.scenario.managed:
            for number in range(self.scenario.nodes + self.scenario.spares):
                self.clock.after(self.rng.uniform(0.0, 3.0), partial(self._start_own, number))
        for fault in self.scenario.faults:
            self.clock.at(fault.at, partial(self._lurk, fault))
        until = self.scenario.quiet_at() + PATIENCE_S
        try:
            async with asyncio.timeout_at(until):
                await self.over.wait()
        except TimeoutError:
            self.history.note("nobody waits any longer")

    def _work_s(self) -> float:
        """How long the disk takes."""
        is_slow = self.clock.now < self._slow_until
        return self.rng.uniform(0.5, 2.0) if is_slow else self.rng.expovariate(500)

    def _is_disk_full(self) -> bool:
        return self.clock.now < self._full_until

    def _durable(self, entries: Sequence[Entry]) -> None:
        """The master's journal has these for ever."""
        records = [decode_record(entry.payload) for entry in entries]
        for record in records:
            self.history.note(f"durable {type(record).__name__}")
            if isinstance(record, rec.WorldAgreed):
                self.job.agreed.add(record.world.round)
        self.checkers.durable(records, ())
        lurking, self._lurking = self._lurking, []
        for fault in lurking:
            self.clock.after(0.0, partial(self._break, fault))

    # ---- who starts what ------------------------------------------------------------------------

    def _start_master(self, disk: Disk) -> None:
        self._masters += 1
        self.history.note(f"master {self._masters} starts")
        self._master = _Master(self, disk, self._masters)

    def kill_master(self, seconds: float) -> None:
        """The master dies; another one starts after a while."""
        if self._master is not None:
            disk = self._master.kill()
            self._master = None
            self.clock.after(seconds, partial(self._start_master, disk))

    async def _kill_resting_master(self, seconds: float) -> None:
        master = self._master
        if master is not None:
            await master.come_to_rest()
            if self._master is master:
                self.kill_master(seconds)

    def _start_ordered(self, node_id: NodeId, node_rank: NodeRank) -> _Node:
        return self._start(f"pod{node_id}", node_id, -1)

    def _start_own(self, number: int) -> None:
        """A machine of a job that nobody manages: its owner starts an agent."""
        if not self.over.is_set() and f"host{number}" not in self._nodes:
            self._start(f"host{number}", -1, -1)

    def _start(self, place: str, node_id: int, rank: int) -> _Node:
        self._started += 1
        node = self._nodes[place] = _Node(self, place, self._started, node_id, rank)
        return node

    def node_ended(self, node: _Node, code: int, *, is_seen: bool) -> None:
        """A node's process is over; in a job that nobody manages its owner starts it again."""
        del self._nodes[node.place]
        if self.scenario.managed:
            node_id = NodeId(int(node.place.removeprefix("pod")))
            if is_seen:
                self.platform.agent_ended(node_id, code)
            else:
                self.platform.machine_lost(node_id)
        elif code != 0:
            number = int(node.place.removeprefix("host"))
            self.clock.after(self.rng.uniform(1.0, 8.0), partial(self._start_own, number))

    def agent_settings(self, place: str, number: int, node_id: int, rank: int) -> AgentSettings:
        """What an agent is told when it starts."""
        folder = self._folder / f"{place}-{number}"
        rules = rules_of(self.scenario.spec())
        launch = Launch(
            nproc=self.scenario.nproc,
            role="default",
            run_id=JOB,
            max_restarts=self.scenario.max_restarts,
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
            token=self.job.token,
            tls=None,
            rules=replace(rules, max_restarts=self.scenario.max_restarts),
            program=program,
            host="",
            node_rank=rank,
            node_id=node_id,
            topology="",
            runtime_dir=folder,
            grace_s=GRACE_S,
            spares=False,
            excluded_roots=(),
            first_contact_s=FIRST_CONTACT_S,
        )

    # ---- what goes wrong ------------------------------------------------------------------------

    def _lurk(self, fault: Fault) -> None:
        """Half of what can hurt the most comes when something was written and nobody knows yet."""
        if fault.kind in ("kill_master", "break_stream") and fault.target % 4 < 2:
            self._lurking.append(fault)
        else:
            self._break(fault)

    def _break(self, fault: Fault) -> None:
        self.history.note(f"FAULT {fault.kind} {fault.target} {fault.seconds}")
        now, seconds = self.clock.now, fault.seconds
        match fault.kind:
            case "kill_master" if fault.target % 2:
                self.kill_master(seconds)
            case "kill_master":
                self.loop.create_task(self._kill_resting_master(seconds))
            case "slow_disk":
                self._slow_until = now + seconds
            case "full_disk":
                self._full_until = now + seconds
            case "fail_launch":
                self.platform.launches_to_fail += 1
            case "slow_launches":
                self.platform.slow_until = now + seconds
            case "cut_rack":
                for place in sorted(self._nodes)[fault.target % 2 :: 2]:
                    self.network.partition(place, (UP, DOWN), seconds)
            case _ if self._nodes:
                nodes = [self._nodes[place] for place in sorted(self._nodes)]
                self._break_node(nodes[fault.target % len(nodes)], fault)

    def _break_node(self, node: _Node, fault: Fault) -> None:
        match fault.kind:
            case "kill_worker" | "crash_worker" | "stop_worker":
                node.hurt_worker(fault)
            case "kill_agent":
                node.kill()
            case "lose_node":
                node.end(-9, is_told=False)
            case "preempt_node":
                node.terminate()
                self.clock.after(model.GRACE_S, node.kill)
            case "break_stream":
                self.network.break_streams(node.place)
            case "half_open":
                self.network.break_streams(node.place, fault.seconds)
            case "slow_link":
                self.network.slow_down(node.place, fault.seconds)
            case _:
                self.network.partition(node.place, _WAYS[fault.kind], fault.seconds)


def run(scenario: Scenario) -> Result:
    """Play a scenario once, with the real drivers."""
    with tempfile.TemporaryDirectory(prefix="holdfast-sim-") as folder:
        return Drivers(scenario, Path(folder)).run()
