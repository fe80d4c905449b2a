# SPDX-License-Identifier: Apache-2.0
"""The failure model gives what was published: the checks without which no result is believed.

Each check draws several histories with fixed seeds and compares their mean or median, so that it
says something about the model and not about one seed.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pvariance

import pytest

from holdfast.model.errors import UsageError
from holdfast.sim import failures, traces
from holdfast.sim.failures import DAY_S, HOUR_S, Fault

SEEDS = range(12)


def drawn(name: str, machines: int, days: float, seed: int) -> list[Fault]:
    """Faults that happen within the span."""
    faults = failures.draw(failures.preset(name), machines, days * DAY_S, seed)
    return [fault for fault in faults if fault.at_s > 0]


def away_p99(faults: list[Fault], days: float) -> float:
    """How many machines are away, at the worst hundredth of the time."""
    changes = sorted(
        change
        for fault in faults
        if fault.takes_machine
        for change in ((fault.at_s, 1), (fault.at_s + fault.lasts_s, -1))
    )
    counts, at, away = [], 0, 0
    for hour in range(int(days * 24)):
        while at < len(changes) and changes[at][0] <= hour * HOUR_S:
            away += changes[at][1]
            at += 1
        counts.append(away)
    return sorted(counts)[int(len(counts) * 0.99)]


def in_service_days(faults: list[Fault], machines: int, days: float) -> float:
    """Machine-days that were not spent in repair."""
    span_s = days * DAY_S
    repair_s = sum(
        min(fault.lasts_s, span_s - fault.at_s) for fault in faults if fault.takes_machine
    )
    return machines * days - repair_s / DAY_S


@cache
def rate_in_service(name: str) -> float:
    """Faults per 1,000 machine-days in service, of 2,048 machines for 54 days."""
    happened, days = 0, 0.0
    for seed in SEEDS:
        faults = failures.draw(failures.preset(name), 2048, 54 * DAY_S, seed)
        happened += sum(fault.at_s > 0 for fault in faults)
        days += in_service_days(faults, 2048, 54)
    return 1000 * happened / days


@pytest.mark.parametrize(("name", "rate"), [("llama3", 3.79), ("rsc1", 6.50), ("rsc2", 2.34)])
def test_machines_in_service_fail_at_the_published_rate(name: str, rate: float) -> None:
    assert rate_in_service(name) == pytest.approx(rate, rel=0.05)


def test_16384_gpus_at_the_rate_of_rsc1_fail_every_1_8_hours() -> None:
    assert 24 * 1000 / (rate_in_service("rsc1") * 2048) == pytest.approx(1.80, rel=0.05)


YEARS = range(80)
"""Seeds for the checks against the year of the trace: 400 servers, 348 days."""


@cache
def year(seed: int) -> list[Fault]:
    return failures.draw(failures.preset("stepfun"), 400, 348 * DAY_S, seed)


def test_400_servers_vary_as_those_of_the_trace_do() -> None:
    """A memoryless model, as others use it, gives 1.0 and 0.31."""
    dispersion, never = [], []
    for seed in YEARS:
        counts = Counter(fault.machine for fault in year(seed) if fault.at_s > 0)
        numbers = [counts[machine] for machine in range(400)]
        dispersion.append(pvariance(numbers) / fmean(numbers))
        never.append(numbers.count(0) / 400)
    assert median(dispersion) == pytest.approx(2.4, abs=0.1)
    assert median(never) == pytest.approx(0.50, abs=0.04)


def test_400_servers_have_31_away_in_the_worst_hundredth_of_a_year() -> None:
    """Independent faults give about 17 in every year, which binomial rules for spares assume."""
    found = sorted(away_p99(year(seed), 348) for seed in YEARS)
    assert median(found) == pytest.approx(31, abs=4)
    assert found[len(found) // 10] < 20, "a year without an outbreak is a calm one"


def test_faults_per_month_vary_as_in_the_trace() -> None:
    """The trace: 19 times as much as by chance. Worse months than these do not make the 31."""
    found = []
    for seed in YEARS:
        months = Counter(int(fault.at_s / DAY_S / 29) for fault in year(seed) if fault.at_s > 0)
        numbers = [months[month] for month in range(12)]
        found.append(pvariance(numbers) / fmean(numbers))
    found.sort()
    assert found[len(found) // 10] < 19 < found[-len(found) // 10]
    assert median(found) == pytest.approx(15, abs=4)


def test_repairs_take_as_long_as_in_the_trace() -> None:
    """Of those that are no plain restart: half 48 h, one in ten 633 h."""
    half, tenth = [], []
    for seed in YEARS:
        hours = sorted(f.lasts_s / HOUR_S for f in year(seed) if f.takes_machine and f.at_s > 0)
        half.append(hours[len(hours) // 2])
        tenth.append(hours[len(hours) * 9 // 10])
    assert median(half) == pytest.approx(48, rel=0.1)
    assert median(tenth) == pytest.approx(633, rel=0.1)


def test_bursts_and_refailures_are_as_often_as_in_the_trace() -> None:
    near, again = [], []
    for seed in YEARS:
        faults = [fault for fault in year(seed) if fault.at_s > 0]
        times = [-HOUR_S * 2, *(fault.at_s for fault in faults), 1e12]
        gaps = [later - sooner for sooner, later in pairwise(times)]
        pairs = pairwise(gaps)
        near.append(sum(min(pair) < HOUR_S for pair in pairs) / len(faults))
        back: dict[int, float] = {}
        count = 0
        for fault in faults:
            count += fault.at_s - back.get(fault.machine, -1e12) < 7 * DAY_S
            back[fault.machine] = fault.at_s + fault.lasts_s * fault.takes_machine
        again.append(count / len(faults))
    assert median(near) == pytest.approx(0.35, abs=0.03)
    assert median(again) == pytest.approx(0.27, abs=0.03)


def test_a_burst_stays_in_one_rack() -> None:
    faults = drawn("rsc1", 4096, 54, 1)
    rack = failures.preset("rsc1").rack_machines
    close = [
        (one.machine // rack, other.machine // rack)
        for one, other in pairwise(faults)
        if other.at_s - one.at_s < 60 and one.cause == other.cause
    ]
    same = sum(first == second for first, second in close)
    assert same > len(close) / 2, "faults of one cause within a minute are mostly of one rack"


def test_a_machine_in_repair_does_not_fail() -> None:
    back: dict[int, float] = {}
    for fault in failures.draw(failures.preset("rsc1"), 512, 54 * DAY_S, 3):
        assert fault.at_s >= back.get(fault.machine, 0.0)
        if fault.takes_machine:
            back[fault.machine] = fault.at_s + fault.lasts_s


def test_a_seed_gives_its_faults_again_and_another_seed_gives_others() -> None:
    assert drawn("llama3", 300, 30, 5) == drawn("llama3", 300, 30, 5)
    assert drawn("llama3", 300, 30, 5) != drawn("llama3", 300, 30, 6)


def test_an_unknown_preset_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match="llama3, rsc1, rsc2, stepfun"):
        failures.preset("llama4")


def test_every_number_has_a_source() -> None:
    table = failures.numbers()
    sources = table.pop("sources")
    told = list(_told(table))
    assert len(told) > 20
    for where, number in told:
        assert isinstance(number, dict), f"{where} has no source"
        assert number["source"] in sources, where
        assert number["why"], where


def _told(node: object, where: str = "") -> Iterator[tuple[str, object]]:
    """What stands at the ends of the table: numbers with their sources."""
    if isinstance(node, dict) and "value" not in node:
        for name, child in node.items():
            yield from _told(child, f"{where}/{name}")
    else:
        yield where, node


# ---- traces --------------------------------------------------------------------------------------


def trace_file(folder: Path, outages: list[tuple[str, float, float, str]]) -> Path:
    """A trace with these outages: server, from and to in days, class."""
    entries = [
        {"node_id": server, "event_time": at, "event_type": kind, "fault_type": {"Class": klass}}
        for server, start, end, klass in outages
        for kind, at in (("fault_start", start), ("fault_end", end))
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps(entries))
    return path


def test_a_trace_is_replayed_as_it_is_for_as_many_machines(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path,
        [
            ("a", 1.0, 3.0, "GPU"),
            ("b", 1.5, 1.51, "NIC"),
            ("a", 4.0, 9.0, "Stress Test Failure"),
            *(("b", day, day + 1.0, "CPU") for day in (10.0, 12.0, 14.0)),
        ],
    )
    outages = traces.read(path, 2)
    faults = traces.replay(outages, failures.preset("stepfun"), 2, 3 * DAY_S, seed=1, servers=2)
    assert [(fault.machine, fault.at_s / DAY_S, fault.cause) for fault in faults] == [
        (0, 1.0, "gpu_compute"),
        (1, 1.5, "network"),
    ]
    assert [fault.is_transient for fault in faults] == [False, True], "the shortest 23 %"


def test_a_trace_for_more_machines_keeps_its_rate_and_what_came_together(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path, [("a", 1.0, 2.0, "GPU"), ("b", 1.0, 2.0, "GPU"), ("c", 9, 10, "CPU")]
    )
    outages = traces.read(path, 4)
    faults = traces.replay(outages, failures.preset("stepfun"), 400, 100 * DAY_S, seed=1, servers=4)
    assert len(faults) == pytest.approx(3 * 100 * 10, rel=0.02)
    at = Counter((fault.at_s, fault.machine // 4) for fault in faults)
    assert sum(count == 2 for count in at.values()) == pytest.approx(100 * 10, rel=0.02)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not JSON", "cannot be read"),
        ("[]", "has no faults"),
        (
            '[{"node_id": "a", "event_time": 1, "event_type": "fault_start", '
            '"fault_type": {"Class": "GPU"}}]',
            "without an end",
        ),
    ],
)
def test_a_trace_that_is_none_is_told_in_a_sentence(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        traces.read(path, 400)
