# SPDX-License-Identifier: Apache-2.0
"""The scenario of one seed of driver mode: a small job, the plans made for it, and its faults."""

from random import Random

from msgspec.structs import replace

from holdfast.sim.scenario import MOMENTS, Fault, Scenario, asks_of, with_a_cut

FAULTS = (
    *("kill_worker", "crash_worker", "stop_worker"),
    *("kill_agent", "lose_node", "preempt_node", "rot_memory"),
    *("break_stream", "slow_link", "partition", "partition_up", "partition_down", "cut_rack"),
    *("kill_master", "slow_disk", "full_disk", "break_storage", "fail_launch", "slow_launches"),
    # Faults that the drivers must handle occur more often.
    *("kill_master", "break_stream", "half_open", "rot_memory"),
)
"""The kinds of faults, named as in core mode."""

_AT_MOST = {"crash_worker": 3, "fail_launch": 2, "lose_node": 3}
"""Limits within what the job forgives, so that every job must come to its end."""


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed: a job of two to four nodes, and a few kinds of trouble."""
    rng = Random(f"drivers {seed}")
    nodes, has_data = rng.randint(2, 4), rng.random() < 0.6
    grows = has_data and rng.random() < 0.2
    scenario = Scenario(
        seed=seed,
        nodes=nodes,
        min_nodes=rng.randint(1, nodes),
        spares=rng.choice((0, 0, 1)),
        nproc=rng.choice((1, 1, 2)),
        managed=rng.random() < 0.5,
        steps=rng.randint(10, 25),
        step_s=rng.choice((0.3, 1.0)),
        save_every=rng.choice((1, 1, 2, 5)),
        persist_every=rng.choice((5, 10, 1000)),
        shared=rng.random() < 0.5,
        samples=rng.randint(60, 240) if has_data else 0,
        shard_size=rng.randint(3, 30),
        epochs=1 if grows else rng.choice((1, 1, 2)),
        shuffle=not grows and rng.random() < 0.3,
        grows=grows,
        ahead=rng.choice((1, 1, 3)),
        lease_s=rng.choice((8.0, 20.0)),
    )
    if scenario.managed and rng.random() < 0.4:
        scenario = replace(scenario, asks=asks_of(rng, scenario))
    scenario = replace(scenario, faults=_faults(rng, scenario))
    return with_a_cut(scenario, Random(f"driver cut {seed}"))


def _faults(rng: Random, scenario: Scenario) -> tuple[Fault, ...]:
    kinds = rng.sample(FAULTS, rng.randint(2, 5))
    moments = MOMENTS if scenario.asks else MOMENTS[:-1]
    faults: list[Fault] = []
    for _ in range(rng.randint(2, 8)):
        kind, when = rng.choice(kinds), ""
        at = rng.uniform(0.0, scenario.length_s())
        if faults and rng.random() < 0.5:
            at = faults[-1].at + rng.choice((0.02, 0.5, 8.0)) * rng.random()
        if rng.random() < 0.3:
            when = rng.choice(moments)
        lasting = rng.choice((0.1, 1.0, 5.0, 10.0, 30.0)) * rng.uniform(0.5, 1.5)
        if sum(fault.kind == kind for fault in faults) < _AT_MOST.get(kind, 8):
            faults.append(Fault(round(at, 3), kind, rng.randrange(16), round(lasting, 3), when))
    return tuple(sorted(faults, key=lambda fault: fault.at))
