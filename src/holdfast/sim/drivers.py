# SPDX-License-Identifier: Apache-2.0
"""Driver mode: the real master and the real agents, as asyncio programs, in virtual time.

Core mode (sim/run.py) models the drivers; this mode runs them: the loop around the core, the
service, links with their handshake and frames, the agent with its stream, relay, beats, worker
groups and vault. It models the transport of bytes (sim/wires.py), the journal, the platform, people
and workers.
"""

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from holdfast.core.job import records as rec
from holdfast.core.job.records import decode_record
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.order import Plan
from holdfast.ports.journal import Entry
from holdfast.runtime.settings import memory_dir
from holdfast.sim import platform as model
from holdfast.sim.checkers import Checkers, Violation
from holdfast.sim.desk import Desk
from holdfast.sim.driver_master import Master
from holdfast.sim.driver_node import MASTER, Node
from holdfast.sim.history import History
from holdfast.sim.keeping import SharedStorage
from holdfast.sim.loop import VirtualLoop, current_process
from holdfast.sim.network import DOWN, UP, Network
from holdfast.sim.ports import Disk
from holdfast.sim.scenario import LURK_S, Ask, Fault, Scenario
from holdfast.sim.script import Job
from holdfast.sim.wires import Wires

PATIENCE_S = 1500.0
"""The job must come to its end within this time after the last fault."""

_WAYS = {"partition": (UP, DOWN), "partition_up": (UP,), "partition_down": (DOWN,)}


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended."""

    problem: str
    """The invariant that was violated; empty if all is well."""
    digest: str
    """A hash over everything that happened."""
    seconds: float
    rounds: int
    commits: int
    restores: int
    plans: int
    """How many plans were carried out."""
    counted: int
    """How many requests of workers went to the master and back."""
    lines: list[str]


class _Watchful(Checkers):
    """Remembers the first problem, in case a driver swallows the error."""

    problem = ""

    def fail(self, what: str) -> None:
        self.problem = self.problem or what
        super().fail(what)


class Drivers:
    """A scenario that is being played."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.folder = folder
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
        self.desk = Desk(self.clock, Random(f"{scenario.seed} desk"))
        self.job = Job(scenario, self.checkers, secrets.token_hex(16).encode(), self.say)
        self.storage = SharedStorage(folder / "storage", self.checkers, self._is_storage_broken)
        self.over = asyncio.Event()
        self._slow_until = self._full_until = self._broken_until = 0.0
        #: Faults that wait for the next write of the journal, or for their moment.
        self._lurking: list[Fault] = []
        self.checkers.at_moment = self._moment
        self._master: Master | None = None
        self._masters = 0
        #: The living nodes, by machine.
        self._nodes: dict[str, Node] = {}
        self._started = 0

    def run(self) -> Result:
        problem = ""
        try:
            self.loop.run(self._main())
            self.checkers.check_end(self.storage.newest(), self.storage.refused)
        except (Violation, RuntimeError) as exc:
            problem = str(exc)
        return Result(
            self.checkers.problem or next(iter(self.loop.surprises), "") or problem,
            self.history.digest(),
            self.clock.now,
            self.checkers.rounds,
            self.checkers.commits,
            self.checkers.restores,
            self.checkers.plans.done,
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
        for number, ask in enumerate(self.scenario.asks, start=1):
            self.clock.at(ask.at, partial(self._ask, f"plan {number}", ask))
        until = self.scenario.quiet_at() + PATIENCE_S
        try:
            async with asyncio.timeout_at(until):
                await self.over.wait()
        except TimeoutError:
            self.history.note("nobody waits any longer")
        for node in self._nodes.values():
            node.cease(is_told=True)

    def say(self, text: str) -> None:
        """Note it without the run's folder, which differs in every run."""
        self.history.note(text.replace(str(self.folder), ""))

    def open_storage(self, _directory: str) -> SharedStorage:
        return self.storage

    def memory_of(self, place: str) -> Path:
        """The shared memory of a machine."""
        folder = self.folder / "memory" / place
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _work_s(self) -> float:
        """How long work in a thread takes: the master's disk, or an agent's work on bytes."""
        process = current_process()
        if process is not None and process.place != MASTER[0]:
            return self.rng.choice((0.002, 0.02, 0.3)) * self.rng.random()
        is_slow = self.clock.now < self._slow_until
        return self.rng.uniform(0.5, 2.0) if is_slow else self.rng.expovariate(500)

    def _is_storage_broken(self) -> bool:
        return self.clock.now < self._broken_until

    def _is_disk_full(self) -> bool:
        return self.clock.now < self._full_until

    def _durable(self, entries: Sequence[Entry]) -> None:
        """These entries are durable in the master's journal."""
        records = [decode_record(entry.payload) for entry in entries]
        for record in records:
            self.history.note(f"durable {type(record).__name__}")
            if isinstance(record, rec.WorldAgreed):
                self.job.agreed.add(record.world.round)
        self.checkers.durable(records, ())
        self._moment("")

    # ---- who starts what ------------------------------------------------------------------------

    def _start_master(self, disk: Disk) -> None:
        self._masters += 1
        self.history.note(f"master {self._masters} starts")
        self._master = Master(self, disk, self._masters)

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

    def _start_ordered(self, node_id: NodeId, node_rank: NodeRank) -> Node:
        return self._start(f"pod{node_id}", node_id)

    def _start_own(self, number: int) -> None:
        """Start an agent on a machine of an unmanaged job, as the machine's owner does."""
        if not self.over.is_set() and f"host{number}" not in self._nodes:
            self._start(f"host{number}", -1)

    def _start(self, place: str, node_id: int) -> Node:
        self._started += 1
        node = Node(self, place, self._started, node_id, self._node_ended)
        self._nodes[place] = node
        return node

    def _node_ended(self, node: Node, code: int, is_seen: bool) -> None:
        """A node's process is over; in an unmanaged job the machine's owner starts it again."""
        del self._nodes[node.place]
        if self.scenario.managed:
            node_id = _node_id(node)
            if is_seen:
                self.platform.agent_ended(node_id, code)
            else:
                self.platform.machine_lost(node_id)
        elif code != 0:
            number = int(node.place.removeprefix("host"))
            self.clock.after(self.rng.uniform(1.0, 8.0), partial(self._start_own, number))

    def _ask(self, plan_id: str, ask: Ask) -> None:
        """A user makes a plan."""
        remove: tuple[NodeId, ...] = ()
        if ask.remove is not None and self._nodes:
            node_ids = sorted(map(_node_id, self._nodes.values()))
            remove = (node_ids[ask.remove % len(node_ids)],)
        plan = Plan(plan_id=plan_id, nodes=ask.nodes, suspend=ask.suspend, remove=remove)
        self.history.note(f"ASKED {plan}")
        self.checkers.plans.asked(plan)
        self.desk.ask(plan)

    # ---- what goes wrong ------------------------------------------------------------------------

    def _lurk(self, fault: Fault) -> None:
        """Break it now, or later. A fault with a moment waits for that moment, for a limited time.
        Half of the most harmful other faults come right after a write, before any node hears of
        it."""
        if fault.when:
            self._lurking.append(fault)
            self.clock.after(LURK_S, partial(self._spring, fault))
        elif fault.kind in ("kill_master", "break_stream") and fault.target % 4 < 2:
            self._lurking.append(fault)
        else:
            self._break(fault)

    def _moment(self, moment: str) -> None:
        """Release the faults that wait for this moment, while its consequences are under way. The
        empty name: a write of the journal."""
        for fault in [one for one in self._lurking if one.when == moment]:
            pause_s = self.rng.choice((0.0, 0.01, 0.1)) * self.rng.random() if moment else 0.0
            self.clock.after(pause_s, partial(self._spring, fault))

    def _spring(self, fault: Fault) -> None:
        if fault in self._lurking:
            self._lurking.remove(fault)
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
            case "break_storage":
                self._broken_until = now + seconds
            case "fail_launch":
                self.platform.launches_to_fail += 1
            case "slow_launches":
                self.platform.slow_until = now + seconds
            case "cut_master":
                self.network.cut_master(seconds)
            case "cut_rack":
                for place in sorted(self._nodes)[fault.target % 2 :: 2]:
                    self.network.partition(place, (UP, DOWN), seconds)
            case _ if self._nodes:
                nodes = [self._nodes[place] for place in sorted(self._nodes)]
                self._break_node(nodes[fault.target % len(nodes)], fault)

    def _break_node(self, node: Node, fault: Fault) -> None:
        match fault.kind:
            case "kill_worker" | "crash_worker" | "stop_worker":
                node.hurt_worker(fault)
            case "kill_agent":
                node.kill()
            case "lose_node":
                node.end(-9, is_told=False)
                shutil.rmtree(self.memory_of(node.place))
            case "rot_memory":
                version = node.rot()
                if version is not None:
                    self.checkers.copies.rotted(version)
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
    with tempfile.TemporaryDirectory(prefix="hf-sim-", dir=memory_dir()) as folder:
        return Drivers(scenario, Path(folder)).run()


def _node_id(node: Node) -> NodeId:
    """The id of a node that the platform has started."""
    return NodeId(int(node.place.removeprefix("pod")))
