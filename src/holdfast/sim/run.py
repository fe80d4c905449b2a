# SPDX-License-Identifier: Apache-2.0
"""One run of a scenario: builds the job, lets time pass, plays the scenario's faults, checks."""

from dataclasses import dataclass
from functools import partial
from random import Random

from holdfast.model.checkpoint import NONE
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.order import Plan
from holdfast.sim.checkers import Checkers, Violation
from holdfast.sim.clock import Clock
from holdfast.sim.desk import Desk
from holdfast.sim.disk import Disk
from holdfast.sim.history import History
from holdfast.sim.master import Master
from holdfast.sim.network import DOWN, UP, Network
from holdfast.sim.node import Agent
from holdfast.sim.platform import GRACE_S, Platform
from holdfast.sim.scenario import LURK_S, Ask, Fault, Scenario
from holdfast.sim.stage import Stage
from holdfast.sim.storage import Storage
from holdfast.sim.vault import Memory

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
    actions: int
    rounds: int
    commits: int
    restores: int
    cuts: int
    """Pieces of data whose tail a rank gave to other ranks."""
    safe_restores: int
    """Restores that had to be as new as the version that was safe on other nodes."""
    plans: int
    """How many plans were carried out."""
    suspended: int
    """How often the job was suspended."""
    has_failed: bool
    """Whether the job ended before its work was done: a budget was used up, or the disk lied."""
    lines: list[str]


class Simulation:
    """A scenario that is being played."""

    def __init__(self, scenario: Scenario) -> None:
        clock = Clock()
        history = History(clock)
        checkers = Checkers(scenario, history)
        network = Network(clock, Random(f"{scenario.seed} network"))
        platform = Platform(clock, Random(f"{scenario.seed} platform"))
        storage = Storage(clock, checkers)
        desk = Desk(clock, Random(f"{scenario.seed} desk"))
        self.stage = Stage(scenario, clock, history, checkers, network, platform, storage, desk)
        self._rng = self.stage.rng("run")
        self._disk = Disk(self.stage.rng("disk"))
        self._master: Master | None = None
        self._masters = 0
        self._is_over = False
        #: The living agents, by machine.
        self._agents: dict[str, Agent] = {}
        self._memories: dict[str, Memory] = {}
        self._ranked = not scenario.managed and self._rng.random() < 0.5
        platform.use(self._start_ordered)
        #: Faults that wait for their moment.
        self._lurking: list[Fault] = []
        checkers.at_moment = self._moment

    def run(self) -> Result:
        scenario, clock = self.stage.scenario, self.stage.clock
        self._start_master()
        if not scenario.managed:
            for number in range(scenario.nodes + scenario.spares):
                clock.after(self._rng.uniform(0.0, 3.0), partial(self._start_own, number))
        for fault in scenario.faults:
            clock.at(fault.at, partial(self._lurk if fault.when else self._break, fault))
        for number, ask in enumerate(scenario.asks, start=1):
            clock.at(ask.at, partial(self._ask, f"plan {number}", ask))
        problem = ""
        try:
            clock.run(scenario.quiet_at() + PATIENCE_S, lambda: self._is_over)
            newest = max(self.stage.storage.committed, default=NONE)
            self.stage.checkers.check_end(newest, self.stage.storage.refused)
        except Violation as exc:
            problem = str(exc)
        checkers = self.stage.checkers
        return Result(
            problem,
            self.stage.history.digest(),
            clock.now,
            clock.actions,
            checkers.rounds,
            checkers.commits,
            checkers.restores,
            checkers.cuts,
            checkers.copies.safe_restores,
            checkers.plans.done,
            checkers.plans.suspended,
            checkers.end is not None and not checkers.end.ok,
            self.stage.history.lines,
        )

    # ---- who starts what ------------------------------------------------------------------------

    def _start_master(self) -> None:
        self._masters += 1
        self.stage.history.note(f"master {self._masters} starts")
        self._master = Master(self.stage, self._disk, self._masters, ended=self._master_ended)
        self._master.start()

    def _master_ended(self, master: Master, is_through: bool) -> None:
        if is_through:
            self.stage.checkers.plans.check_end(master.core.nodes.wanted()["nodes"])
            self._is_over = True
        else:
            self.stage.clock.after(self._rng.uniform(1.0, 5.0), self._start_master)

    def _start_ordered(self, node_id: NodeId, node_rank: NodeRank) -> Agent:
        place = f"pod{node_id}"
        agent = Agent(self.stage, place, Memory(), ended=self._ordered_ended, node_id=node_id)
        self._agents[place] = agent
        return agent

    def _ordered_ended(self, agent: Agent, exit_code: int) -> None:
        self._agents.pop(agent.place, None)
        self.stage.platform.agent_ended(NodeId(int(agent.place[3:])), exit_code)

    def _start_own(self, number: int) -> None:
        """Start an agent on a machine of an unmanaged job, as its owner does, and again if it ends.

        The next agent takes over what a killed agent left in memory.
        """
        place = f"host{number}"
        if self._is_over or place in self._agents:
            return
        memory = self._memories.setdefault(place, Memory())
        is_ranked = self._ranked and number < self.stage.scenario.nodes
        rank = number if is_ranked else -1
        self._agents[place] = Agent(
            self.stage, place, memory, ended=self._own_ended, node_rank=rank
        )

    def _own_ended(self, agent: Agent, exit_code: int) -> None:
        self._agents.pop(agent.place, None)
        if exit_code != 0:
            self._own_again(agent)

    def _own_again(self, agent: Agent) -> None:
        number = int(agent.place[4:])
        self.stage.clock.after(self._rng.uniform(1.0, 8.0), partial(self._start_own, number))

    def _ask(self, plan_id: str, ask: Ask) -> None:
        """A user makes a plan."""
        remove: tuple[NodeId, ...] = ()
        if ask.remove is not None and self.stage.agents:
            node_ids = sorted(self.stage.agents)
            remove = (NodeId(node_ids[ask.remove % len(node_ids)]),)
        plan = Plan(plan_id=plan_id, nodes=ask.nodes, suspend=ask.suspend, remove=remove)
        self.stage.history.note(f"ASKED {plan}")
        self.stage.checkers.plans.asked(plan)
        self.stage.desk.ask(plan)

    # ---- what goes wrong ------------------------------------------------------------------------

    def _lurk(self, fault: Fault) -> None:
        self._lurking.append(fault)
        self.stage.clock.after(LURK_S, partial(self._spring, fault))

    def _moment(self, moment: str) -> None:
        """Release the faults of this moment: its consequences are under way for milliseconds."""
        for fault in [one for one in self._lurking if one.when == moment]:
            pause_s = self._rng.choice((0.0, 0.01, 0.1)) * self._rng.random()
            self.stage.clock.after(pause_s, partial(self._spring, fault))

    def _spring(self, fault: Fault) -> None:
        if fault in self._lurking:
            self._lurking.remove(fault)
            self._break(fault)

    def _break(self, fault: Fault) -> None:
        self.stage.history.note(f"FAULT {fault.kind} {fault.target} {fault.seconds}")
        now, seconds = self.stage.clock.now, fault.seconds
        match fault.kind:
            case "kill_master":
                self._kill_master(seconds)
            case "lying_disk":
                self._kill_master(seconds)
                self._disk.lose_power()
                self.stage.checkers.worlds.disk_lied(now + self.stage.scenario.lease_s)
                self.stage.checkers.counts_forgotten()
            case "slow_disk":
                self._disk.slow_until = now + seconds
            case "full_disk":
                self._disk.full_until = now + seconds
            case "break_storage":
                self.stage.storage.broken_until = now + seconds
            case "fail_launch":
                self.stage.platform.launches_to_fail += 1
            case "slow_launches":
                self.stage.platform.slow_until = now + seconds
            case "shrink_quota":
                nodes = self.stage.scenario.nodes
                self.stage.platform.shrink_quota(1 + fault.target % nodes, seconds)
            case "cut_rack":
                for place in sorted(self._agents)[fault.target % 2 :: 2]:
                    self.stage.network.partition(place, (UP, DOWN), seconds)
            case "cut_master":
                self.stage.network.cut_master(seconds)
            case "cut_world":
                # The world's spares stay: they could take its place while it still computes.
                for place in [p for p in sorted(self._agents) if self._agents[p].workers]:
                    self.stage.network.partition(place, (UP, DOWN), seconds)
            case "stop_agents":
                for place in [p for p in sorted(self._agents) if self._agents[p].workers]:
                    self._agents[place].stand_still(seconds)
            case _ if self._agents:
                agents = [self._agents[place] for place in sorted(self._agents)]
                self._break_node(agents[fault.target % len(agents)], fault)

    def _kill_master(self, seconds: float) -> None:
        if self._master is not None and self._master.is_alive:
            self._master.kill()
            self.stage.clock.after(seconds, self._start_master)

    def _break_node(self, agent: Agent, fault: Fault) -> None:
        network, clock = self.stage.network, self.stage.clock
        match fault.kind:
            case "kill_worker" | "crash_worker" | "stop_worker":
                for worker in list(agent.workers.values())[:1]:
                    if fault.kind == "kill_worker":
                        worker.end(9, 0.0)
                    elif fault.kind == "crash_worker":
                        worker.crash()
                    else:
                        worker.stop(fault.seconds)
            case "kill_agent":
                agent.kill()
            case "lose_node":
                self._lose(agent)
            case "preempt_node":
                agent.terminate()
                clock.after(GRACE_S, agent.kill)
            case "rot_memory":
                for (version, _), copy in list(agent.memory.copies.items())[-1:]:
                    copy.is_rotten = True
                    self.stage.checkers.copies.rotted(version)
            case "break_stream":
                network.break_streams(agent.place)
            case "half_open":
                network.break_streams(agent.place, fault.seconds)
            case "lose_request" | "lose_answer":
                way = UP if fault.kind == "lose_request" else DOWN
                network.lose_next(agent.place, way, fault.seconds)
            case "slow_link":
                network.slow_down(agent.place, fault.seconds)
            case _:
                network.partition(agent.place, _WAYS[fault.kind], fault.seconds)

    def _lose(self, agent: Agent) -> None:
        del self._agents[agent.place]
        agent.vanish()
        if self.stage.scenario.managed:
            self.stage.platform.machine_lost(NodeId(int(agent.place[3:])))
        else:
            self._own_again(agent)


def run(scenario: Scenario) -> Result:
    """Play a scenario once."""
    return Simulation(scenario).run()
