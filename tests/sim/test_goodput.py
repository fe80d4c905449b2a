# SPDX-License-Identifier: Apache-2.0
"""The goodput of a simulated job: who decides, where the time goes, and what the command tells."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from holdfast.cli import main
from holdfast.sim import failures
from holdfast.sim.failures import CORRUPT, CRASH, DAY_S, HANG, SLOW, Fault
from holdfast.sim.goodput import Cluster
from holdfast.sim.policies import Policy, policies, with_stages
from holdfast.sim.prediction import CORE, RULES, Prediction, predict

SMALL = Cluster(
    nodes=8,
    min_nodes=4,
    spares=1,
    reserve=2,
    replace_s=600.0,
    rack_machines=4,
    checkpoint_every_s=10.0,
    persist_every_s=100.0,
    span_s=10_000.0,
)
OURS = with_stages(
    policies()["ours"],
    {
        "save_s": 0.0,
        "rendezvous_s": 1.0,
        "restart_s": 2.0,
        "memory_restore_s": 3.0,
        "peer_restore_s": 4.0,
        "storage_restore_s": 50.0,
        "copy_s": 1.0,
        "persist_s": 5.0,
    },
)


def fault(at_s: float, machine: int, manner: str = CRASH, **changes: object) -> Fault:
    """A fault that takes its machine for longer than the simulation lasts."""
    one = Fault(at_s, machine, "gpu_compute", manner, False, False, 1e6)
    return replace(one, **changes)  # type: ignore[arg-type]


def seconds(prediction: Prediction) -> dict[str, float]:
    found = prediction.figures["seconds"]
    assert isinstance(found, dict)
    return found


def simulated(*faults: Fault, cluster: Cluster = SMALL, policy: Policy = OURS) -> Prediction:
    """By the real core; every second of it is accounted for."""
    prediction = predict(cluster, policy, CORE, faults)
    assert sum(seconds(prediction).values()) == pytest.approx(cluster.span_s)
    return prediction


def test_without_faults_all_but_the_start_is_work() -> None:
    prediction = simulated()
    assert seconds(prediction)["productive"] == pytest.approx(10_000.0 - 3.0)
    assert prediction.figures["rounds"] == 1


def test_a_lost_node_costs_its_stages_and_the_work_since_the_copied_save() -> None:
    # It steps from 3.0 on; the save at 993.0 is copied, the crash comes 7 s later.
    prediction = simulated(fault(1000.0, 2))
    lost = seconds(prediction)
    assert lost["detect"] == pytest.approx(0.01 + 0.3)
    assert lost["restore"] == pytest.approx(4.0)
    assert lost["lost"] == pytest.approx(7.0)
    assert prediction.figures["interruptions"] == 1
    assert prediction.figures["spares_used"] == 1
    recovery = prediction.figures["recovery_s"]
    assert isinstance(recovery, dict)
    assert recovery["max"] == pytest.approx(0.31 + 7.0)


def test_a_save_that_is_not_copied_yet_dies_with_its_node() -> None:
    assert seconds(simulated(fault(993.5, 2)))["lost"] == pytest.approx(10.5)
    in_place = fault(993.5, 2, is_transient=True)
    assert seconds(simulated(in_place))["lost"] == pytest.approx(0.5 + 0.0, abs=0.01)


def test_a_node_and_the_keeper_of_its_copies_lost_at_once_mean_storage() -> None:
    """Two nodes of one rack keep no copies for each other: losing both costs a save, no more."""
    same_rack = simulated(fault(1000.0, 0), fault(1000.0, 1))
    assert same_rack.figures["restores_from_storage"] == 0
    all_of_them = [fault(1000.0, machine) for machine in range(4)]
    both_racks = simulated(*all_of_them, fault(1000.0, 4))
    assert both_racks.figures["restores_from_storage"] == 1
    assert seconds(both_racks)["lost"] > 90.0


def test_a_hang_costs_what_it_takes_to_know() -> None:
    lost = seconds(simulated(fault(1000.0, 2, HANG)))
    assert lost["detect"] == pytest.approx(OURS.hang_known_s + OURS.grace_s)


def test_silent_corruption_takes_back_what_was_saved_after_it() -> None:
    prediction = simulated(fault(1000.0, 2, CORRUPT))
    # The last save on storage before it was at 903.0, and it is known at 5,289.
    expected = OURS.corrupt_known_s + 97.0
    assert seconds(prediction)["lost"] == pytest.approx(expected, abs=1.0)


def test_a_slow_machine_slows_all_down_while_it_lasts() -> None:
    slow = fault(1000.0, 2, SLOW, is_transient=True, lasts_s=1000.0, factor=1.25)
    lost = seconds(simulated(slow))
    assert lost["slow"] == pytest.approx(200.0)
    assert lost["detect"] == 0.0


def test_without_machines_the_world_shrinks_and_grows_again() -> None:
    cluster = replace(SMALL, spares=0, reserve=0)
    prediction = simulated(fault(1000.0, 2, lasts_s=8000.0 - 600.0), cluster=cluster)
    assert prediction.figures["smallest_world"] == 7
    assert prediction.figures["growths"] == 1
    lost = seconds(prediction)
    assert lost["fewer nodes"] == pytest.approx(8000.0 / 8, rel=0.01)
    # Both changes of the world go back to the save before them: 7 s, and less than one period.
    assert 7.0 < lost["lost"] < 17.0


def test_a_job_that_is_not_elastic_waits_for_a_machine() -> None:
    cluster = replace(SMALL, spares=0, min_nodes=8)
    prediction = simulated(fault(1000.0, 2), cluster=cluster)
    assert seconds(prediction)["idle"] == pytest.approx(600.0, abs=1.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("spares", "reserve"), [(3, 12), (1, 1), (0, 0)])
def test_the_rules_decide_as_the_real_core_does(seed: int, spares: int, reserve: int) -> None:
    """Everything but the number of events: so every round had the same size at the same time."""
    cluster = replace(
        SMALL, nodes=64, min_nodes=40, spares=spares, reserve=reserve, span_s=60 * DAY_S
    )
    model = replace(failures.preset("rsc1"), per_machine_s=2e-7)
    faults = failures.draw(model, cluster.machines, cluster.span_s, seed)
    by_core, by_rules = (
        predict(cluster, policies()["ours"], engine, faults) for engine in (CORE, RULES)
    )
    assert _comparable(by_core) == _comparable(by_rules)
    assert by_core.sliding == by_rules.sliding
    rounds = by_core.figures["rounds"]
    assert isinstance(rounds, int)
    assert rounds > 40, "too little happened to compare anything"


def _comparable(prediction: Prediction) -> dict[str, object]:
    return {k: v for k, v in prediction.figures.items() if k not in ("engine", "events")}


def test_2048_nodes_are_interrupted_419_times_in_54_days() -> None:
    """Llama 3: 419; 46 is two standard deviations of one such run, of a mean of three 27."""
    found = []
    for seed in range(3):
        cluster = replace(SMALL, nodes=2048, min_nodes=1843, spares=12, reserve=204)
        cluster = replace(cluster, span_s=54 * DAY_S, rack_machines=16)
        faults = failures.draw(failures.preset("llama3"), cluster.machines, cluster.span_s, seed)
        interruptions = predict(cluster, OURS, RULES, faults).figures["interruptions"]
        assert isinstance(interruptions, int)
        found.append(interruptions)
    assert fmean(found) == pytest.approx(419, abs=46)


# ---- the command ---------------------------------------------------------------------------------

COMMAND = ("sim", "--nodes", "64", "--days", "20", "--failures", "rsc1")


def test_the_same_seed_gives_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, other = (tmp_path / name for name in ("one.json", "two.json", "other.json"))
    for path, seed in ((one, 7), (two, 7), (other, 8)):
        words = [*COMMAND, "--compare", "--seed", str(seed), "--json", str(path)]
        assert main(words) == 0
    assert one.read_bytes() == two.read_bytes()
    assert one.read_bytes() != other.read_bytes()
    told = json.loads(one.read_bytes())
    assert 0.9 < told["goodput"] <= 1.0
    assert told["engine"] == "core"
    assert set(told["others"]) == {"flash", "torchrun", "manual"}
    assert told["others"]["manual"]["goodput"] < told["goodput"]
    assert "bench/RESULTS.md" in capsys.readouterr().out


def test_a_stage_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert main([*COMMAND, "--stage", "hang_known_s=5", "--json", str(path)]) == 0
    assert json.loads(path.read_bytes())["stages"]["hang_known_s"] == 5.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--failures", "nowhere"], "there are no failures 'nowhere'"),
        (["--nodes", "0"], "--nodes is 0"),
        (["--spares", "-1"], "--spares is -1"),
        (["--min-nodes", "65"], "--min-nodes is 65"),
        (["--stage", "hang_known_s"], "NAME=SECONDS"),
        (["--stage", "lunch_s=5"], "there is no stage 'lunch_s'"),
        (["--picture", "a.gif"], ".png or .svg"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"goodput.{suffix}"
    assert main([*COMMAND, "--picture", str(path)]) == 0
    assert path.stat().st_size > 10_000
