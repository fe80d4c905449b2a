# SPDX-License-Identifier: Apache-2.0
"""What one seed stands for: a small job, and what goes wrong in it. Plain data, so that a scenario
that failed can be made smaller, kept in a file and played again."""

from random import Random

from msgspec import Struct
from msgspec.structs import replace

from holdfast.model.dataset import BY_SHARD, IN_ORDER, Dataset
from holdfast.model.job import NODE_RELAUNCHES, JobSpec
from holdfast.model.node import ExitReason

DIRECTORY = "/ckpt"

OF_WORKERS = ("kill_worker", "crash_worker", "stop_worker")
OF_NODES = ("kill_agent", "lose_node", "preempt_node", "rot_memory")
OF_STREAMS = ("break_stream", "slow_link")
OF_NETWORK = ("partition", "partition_up", "partition_down", "cut_rack")
OF_MASTER = ("kill_master", "slow_disk", "full_disk")
OF_OTHERS = ("break_storage", "fail_launch", "slow_launches")
KINDS = OF_WORKERS + OF_NODES + OF_STREAMS + OF_NETWORK + OF_MASTER + OF_OTHERS


BATCH = 4
"""Samples of a rank in a step."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong."""

    at: float
    kind: str
    """One of KINDS."""
    target: int = 0
    """Which of the nodes that live then, counted round."""
    seconds: float = 0.0
    """How long it lasts, where that means something."""


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
    """How many steps the program makes; with data it ends with them."""
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
    max_restarts: int = 3
    lease_s: float = 20.0
    compact_after: int = 1000
    faults: tuple[Fault, ...] = ()

    def spec(self) -> JobSpec:
        """The rules of the job; patience is shorter than usual, so that less time must pass."""
        return JobSpec(
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
        )

    def dataset(self) -> Dataset | None:
        if not self.samples:
            return None
        return Dataset(
            "train",
            size=self.samples,
            shard_size=self.shard_size,
            epochs=self.epochs,
            shuffle=BY_SHARD if self.shuffle else IN_ORDER,
            series=DIRECTORY,
        )

    def length_s(self) -> float:
        """About how long the job would take if nothing went wrong."""
        steps = self.steps
        if self.samples:
            steps = self.samples * self.epochs // (BATCH * self.nproc * self.nodes)
        return 5.0 + steps * self.step_s

    def quiet_at(self) -> float:
        """When the last fault is over."""
        return max((fault.at + fault.seconds for fault in self.faults), default=0.0)


def from_seed(seed: int) -> Scenario:
    """The scenario of a seed. Each seed has few kinds of faults, and other ones: a swarm finds more
    than a mix of everything every time."""
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
        spares=rng.choice((0, 1, 2)),
        nproc=nproc,
        managed=managed,
        steps=rng.randint(20, 60),
        step_s=rng.choice((0.3, 1.0, 2.0)),
        save_every=rng.choice((1, 1, 2, 5)),
        persist_every=rng.choice((5, 10, 1000)),
        shared=rng.random() < 0.5,
        replicas=rng.choice((0, 0, 1)),
        samples=rng.randint(100, 500) if has_data else 0,
        shard_size=rng.randint(3, 30),
        epochs=rng.choice((1, 1, 2)),
        shuffle=rng.random() < 0.3,
        lease_s=rng.choice((8.0, 20.0)),
        compact_after=rng.choice((50, 300, 100_000)),
    )
    kinds = rng.sample(KINDS, rng.randint(1, 6))
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 10)):
        # Trouble comes in bursts: what is rare alone happens while something else is under way.
        near = rng.choice(faults).at if faults and rng.random() < 0.5 else None
        faults.append(_fault(rng, rng.choice(kinds), near, scenario.length_s()))
    faults.sort(key=lambda fault: fault.at)
    return replace(scenario, faults=_within_budget(scenario, faults))


def _fault(rng: Random, kind: str, near: float | None, length_s: float) -> Fault:
    at = rng.uniform(0.0, length_s)
    if near is not None:
        at = near + rng.choice((0.02, 0.5, 8.0)) * rng.random()
    lasting = rng.choice((0.1, 1.0, 5.0, 10.0, 20.0, 30.0)) * rng.uniform(0.5, 1.5)
    return Fault(round(at, 3), kind, rng.randrange(16), round(lasting, 3))


def _within_budget(scenario: Scenario, faults: list[Fault]) -> tuple[Fault, ...]:
    """Without more failures of one class than are forgiven: the job must come to its end."""
    left = {
        "crash_worker": scenario.max_restarts,
        "fail_launch": NODE_RELAUNCHES[ExitReason.HARDWARE] - 3,
        "lose_node": 3,
    }
    kept: list[Fault] = []
    for fault in faults:
        if left.get(fault.kind, 1) > 0:
            kept.append(fault)
            if fault.kind in left:
                left[fault.kind] -= 1
    return tuple(kept)
