# SPDX-License-Identifier: Apache-2.0
"""The scenario of one seed: a small job and its faults. It is plain data, so that a failing
scenario can be made smaller, kept in a file and played again."""

from random import Random

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.job.membership.departures import LEAVE_S
from holdfast.model.dataset import BY_SHARD, IN_ORDER, STREAM, Dataset, Extent
from holdfast.model.job import NODE_RELAUNCHES, WORKER_RESTARTS, JobSpec
from holdfast.model.node import ExitReason

DIRECTORY = "/ckpt"

OF_WORKERS = ("kill_worker", "crash_worker", "stop_worker")
OF_NODES = ("kill_agent", "lose_node", "preempt_node", "rot_memory")
OF_STREAMS = ("break_stream", "half_open", "lose_request", "lose_answer", "slow_link")
OF_NETWORK = ("partition", "partition_up", "partition_down")
OF_MANY = ("cut_rack", "cut_world", "shrink_quota")
OF_MASTER = ("kill_master", "slow_disk", "full_disk")
OF_OTHERS = ("break_storage", "fail_launch", "slow_launches")
STILL = "stop_agents"
"""The agents of the world stand still, its workers do not: an extra fault of some seeds."""

KINDS = OF_WORKERS + OF_NODES + OF_STREAMS + OF_NETWORK + OF_MANY + OF_MASTER + OF_OTHERS
"""The kinds that seeds draw."""

LIE = "lying_disk"
"""The master's machine loses power, and its disk had lied: an extra fault of some seeds."""

CUT = "cut_master"
"""Only the master's own network is down: an extra fault of some seeds."""

MOMENTS = ("world", "restore", "attempt", "plan")
"""A world is formed, a restore agreed, a checkpoint begun, a plan done: much is under way then."""

LURK_S = 20.0

BATCH = 4
"""Samples that a rank reads in a step."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong."""

    at: float
    kind: str
    """One of KINDS."""
    target: int = 0
    """Index of the node among those alive then, modulo their number."""
    seconds: float = 0.0
    """How long the fault lasts, if it has a duration."""
    when: str = ""
    """One of MOMENTS: the fault waits for it, from `at` on, but not longer than LURK_S."""


class Ask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that a user makes for the running job."""

    at: float
    nodes: int | None = None
    suspend: bool | None = None
    remove: int | None = None
    """Index of the node among those alive then, modulo their number."""


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job and its faults. `seed` decides every delay on the way."""

    seed: int
    nodes: int
    min_nodes: int
    node_unit: int = 1
    spares: int = 0
    nproc: int = 1
    managed: bool = False
    steps: int = 40
    """How many steps the program makes; with data it ends when the data end."""
    step_s: float = 1.0
    save_every: int = 1
    persist_every: int = 10
    shared: bool = True
    """Whether all ranks hold the same model."""
    replicas: int = 0
    samples: int = 0
    """0: the program reads no data."""
    shard_size: int = 10
    epochs: int = 1
    shuffle: bool = False
    grows: bool = False
    """The data are a stream of two partitions, which is written while the job runs."""
    ahead: int = 1
    """How many pieces of the data a rank takes at once."""
    max_restarts: int = 3
    budget: int | None = None
    """If given, the job forgives so few restarts and relaunches of every class that it may fail. It
    must then say why, and a budget must be used up."""
    is_loud: bool = False
    """Whether the loss of a rank is an error in the other ranks; otherwise they wait for it."""
    lease_s: float = 20.0
    compact_after: int = 1000
    faults: tuple[Fault, ...] = ()
    asks: tuple[Ask, ...] = ()
    """Only in managed jobs."""

    def spec(self) -> JobSpec:
        """The rules of the job; patience is shorter than usual, so that less time must pass."""
        relaunches, restarts = dict(NODE_RELAUNCHES), dict(WORKER_RESTARTS)
        if self.budget is not None:
            relaunches, restarts = (dict.fromkeys(ExitReason, self.budget) for _ in range(2))
        restarts[ExitReason.ERROR] = self.max_restarts
        return JobSpec(
            worker_restarts=restarts,
            node_relaunches=relaunches,
            min_nodes=self.min_nodes,
            max_nodes=self.nodes,
            node_unit=self.node_unit,
            last_call_s=4.0,
            join_timeout_s=900.0,
            beat_s=2.0,
            silence_s=6.0,
            lease_s=self.lease_s,
            managed=self.managed,
            spare_nodes=self.spares,
            size_from_platform=bool(self.asks),
        )

    def dataset(self) -> Dataset | None:
        if not self.samples:
            return None
        if self.grows:
            sizes = (self.samples // 2, self.samples - self.samples // 2)
            return Dataset(
                "train",
                kind=STREAM,
                shard_size=self.shard_size,
                extents=tuple(Extent(f"p{number}", size) for number, size in enumerate(sizes)),
                series=DIRECTORY,
                grows=True,
            )
        return Dataset(
            "train",
            size=self.samples,
            shard_size=self.shard_size,
            epochs=self.epochs,
            shuffle=BY_SHARD if self.shuffle else IN_ORDER,
            series=DIRECTORY,
        )

    def written(self, now: float) -> tuple[int, ...]:
        """How far the partitions of the stream are written: completely before the job could end."""
        dataset = self.dataset()
        assert dataset is not None
        share = min(1.0, now / (0.8 * self.length_s()))
        return tuple(int(share * extent.size) for extent in dataset.extents)

    def length_s(self) -> float:
        """About how long the job would take if nothing went wrong."""
        steps = self.steps
        if self.samples:
            steps = self.samples * self.epochs // (BATCH * self.nproc * self.nodes)
        return 5.0 + steps * self.step_s

    def quiet_at(self) -> float:
        """When the last fault is over, and the last plan is done."""
        lasting = [f.at + f.seconds + (LURK_S if f.when else 0.0) for f in self.faults]
        return max(lasting + [ask.at + LEAVE_S for ask in self.asks], default=0.0)


def from_seed(seed: int) -> Scenario:
    """The scenario of a seed. Each seed has only a few kinds of faults, different from seed to
    seed: such a swarm finds more than a mix of all kinds every time."""
    rng = Random(f"scenario {seed}")
    nodes, node_unit = rng.choice((1, 1, 2, 2, 3, 4, 5, 6)), 1
    if nodes % 2 == 0 and rng.random() < 0.2:
        node_unit = 2
    managed = rng.random() < 0.5
    has_data = rng.random() < 0.6
    nproc = rng.choice((1, 1, 2))
    scenario = Scenario(
        seed=seed,
        nodes=nodes,
        min_nodes=max(node_unit, rng.randint(1, nodes)),
        node_unit=node_unit,
        spares=rng.choice((0, 1, 2, 3)),
        nproc=nproc,
        managed=managed,
        steps=rng.randint(20, 60),
        step_s=rng.choice((0.3, 1.0, 2.0)),
        save_every=rng.choice((1, 1, 2, 5)),
        persist_every=rng.choice((5, 10, 1000)),
        shared=rng.random() < 0.5,
        replicas=rng.choice((0, 1)),
        samples=rng.randint(100, 500) if has_data else 0,
        shard_size=rng.randint(3, 30),
        epochs=rng.choice((1, 1, 2)),
        shuffle=rng.random() < 0.3,
        lease_s=rng.choice((8.0, 20.0)),
        compact_after=rng.choice((50, 300, 100_000)),
        ahead=rng.choice((1, 1, 3)),
    )
    scenario = _with_temper(rng, scenario)
    if has_data and rng.random() < 0.2:
        scenario = replace(scenario, grows=True, epochs=1, shuffle=False)
    if managed and rng.random() < 0.4:
        scenario = replace(scenario, asks=asks_of(rng, scenario))
    moments = MOMENTS if scenario.asks else MOMENTS[:-1]
    kinds = rng.sample(KINDS, rng.randint(1, 6))
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 10)):
        # Faults come in bursts: a harmless fault then hits while another is under way.
        near = rng.choice(faults).at if faults and rng.random() < 0.5 else None
        faults.append(_fault(rng, rng.choice(kinds), near, scenario.length_s(), moments))
    faults.sort(key=lambda fault: fault.at)
    scenario = _with_a_lie(replace(scenario, faults=_within_budget(scenario, faults)))
    return with_a_cut(_with_still_agents(scenario), Random(f"cut {seed}"))


def _with_a_lie(scenario: Scenario) -> Scenario:
    """In some seeds the disk lies. Never beside plans: a user, unlike an agent, does not tell the
    next master what was already answered."""
    rng = Random(f"lie {scenario.seed}")
    if scenario.asks or rng.random() >= 0.05:
        return scenario
    lie = Fault(round(rng.uniform(0.0, scenario.length_s()), 3), LIE, 0, rng.choice((0.5, 3.0)))
    return replace(scenario, faults=(*scenario.faults, lie))


def _with_still_agents(scenario: Scenario) -> Scenario:
    """In some seeds agents stand still, mostly for longer than the lease. A worker that saves or
    reads data waits for its agent: in half of these seeds no worker does either."""
    rng = Random(f"still {scenario.seed}")
    if rng.random() >= 0.15:
        return scenario
    if rng.random() < 0.5:
        scenario = replace(scenario, save_every=1000, samples=0, grows=False)
    at, lasting = rng.uniform(0.0, scenario.length_s()), rng.choice((3.0, 60.0, 60.0))
    still = Fault(round(at, 3), STILL, 0, lasting, rng.choice(("", "", "world", "restore")))
    return replace(scenario, faults=(*scenario.faults, still))


def with_a_cut(scenario: Scenario, rng: Random) -> Scenario:
    """In some seeds the master is cut off from all nodes: for less than a silence, for less than a
    lease, or for longer."""
    if rng.random() >= 0.15:
        return scenario
    lasting = round(rng.uniform(2.0, 1.5 * scenario.lease_s), 3)
    at = round(rng.uniform(0.0, scenario.length_s()), 3)
    cut = Fault(at, CUT, 0, lasting, rng.choice(("", "", MOMENTS[0])))
    return replace(scenario, faults=tuple(sorted((*scenario.faults, cut), key=lambda f: f.at)))


def _with_temper(rng: Random, scenario: Scenario) -> Scenario:
    """How the program takes the loss of a rank, and how much the job forgives."""
    lot = rng.random()
    if lot < 0.3:
        # The consequences of a lost rank count as errors of the program: no budget for them here.
        return replace(scenario, is_loud=True, max_restarts=100)
    if lot < 0.4:
        budget = rng.choice((0, 1, 2))
        return replace(scenario, budget=budget, max_restarts=budget)
    return scenario


def _fault(
    rng: Random, kind: str, near: float | None, length_s: float, moments: tuple[str, ...]
) -> Fault:
    at, when = rng.uniform(0.0, length_s), ""
    if rng.random() < 0.4:
        # The fault waits for what follows from another fault, or for the first world.
        at, when = near or 0.0, rng.choice(moments)
    elif near is not None:
        at = near + rng.choice((0.02, 0.5, 8.0)) * rng.random()
    # A cut of many nodes matters only if it lasts longer than the silence that the job tolerates.
    lasting = rng.choice((10.0, 20.0) if kind in OF_MANY else (0.1, 1.0, 5.0, 10.0, 20.0, 30.0))
    lasting *= rng.uniform(0.5, 1.5)
    return Fault(round(at, 3), kind, rng.randrange(16), round(lasting, 3), when)


def asks_of(rng: Random, scenario: Scenario) -> tuple[Ask, ...]:
    """A few plans. A user who suspends the job resumes it, sooner or later."""
    asks: list[Ask] = []
    for _ in range(rng.randint(1, 4)):
        at, lot = round(rng.uniform(0.0, scenario.length_s()), 3), rng.random()
        if lot < 0.5:
            size = rng.randint(scenario.min_nodes, scenario.nodes + 2)
            asks.append(Ask(at=at, nodes=size))
        elif lot < 0.7:
            asks.append(Ask(at=at, remove=rng.randrange(16)))
        else:
            later = at + rng.choice((1.0, 10.0, 150.0)) * rng.uniform(0.5, 1.5)
            asks += [Ask(at=at, suspend=True), Ask(at=round(later, 3), suspend=False)]
    asks.sort(key=lambda ask: ask.at)
    # Of two overlapping pauses, the first resume would end the other too: the last word counts.
    if any(ask.suspend for ask in asks):
        asks.append(Ask(at=asks[-1].at + 1.0, suspend=False))
    return tuple(asks)


def _within_budget(scenario: Scenario, faults: list[Fault]) -> tuple[Fault, ...]:
    """The faults without those that exceed a budget: the job must come to its end."""
    if scenario.budget is not None:
        return tuple(faults)
    left = {
        "crash_worker": scenario.max_restarts,
        "lose_node": 3,
    }
    kept: list[Fault] = []
    for fault in faults:
        if left.get(fault.kind, 1) > 0:
            kept.append(fault)
            if fault.kind in left:
                left[fault.kind] -= 1
    return tuple(kept)
