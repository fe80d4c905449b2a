# SPDX-License-Identifier: Apache-2.0
"""How workers started, and whether nodes are warm: what is told is what was reported."""

from holdfast.core.job import events as ev
from holdfast.master.stories import tell
from holdfast.model.job import JobSpec
from holdfast.protocol import messages as m
from tests.core.harness import Job, of_kind


def told_of_starts(*ways: str) -> str:
    """The story of a round whose nodes started their workers in these ways."""
    job = Job(JobSpec(min_nodes=len(ways), max_nodes=len(ways)))
    for number in range(len(ways)):
        job.attach(f"n{number}")
    told: list[str] = []
    for number, how in enumerate(ways):
        report = m.WorkersStarted(1, 5001, how, 0.05)
        name = f"n{number}"
        outcome = job.feed(ev.StartReported(job.node_of[name], job.link(name), 1, report))
        told += map(tell, of_kind(ev.WorldStarted, outcome.facts))
    (story,) = told
    return story


def test_a_round_whose_nodes_all_start_alike_has_one_word() -> None:
    assert told_of_starts("zygote", "zygote") == "round 1: all workers run (zygote start)"


def test_nodes_that_start_in_another_way_are_named_whoever_reports_last() -> None:
    expected = "round 1: all workers run (zygote start, cold on node rank 1)"
    assert told_of_starts("zygote", "cold", "zygote") == expected
    many = told_of_starts(*["cold"] * 10, *["zygote"] * 11)
    assert many.endswith("cold on node rank 7, and 2 more)")


def test_a_node_is_as_warm_as_its_last_beat_says() -> None:
    job = Job(JobSpec(min_nodes=1, max_nodes=1))
    job.attach("a")

    def warm() -> object:
        return job.machines.nodes.view(0.0)[0]["warm"]

    assert warm() is None
    for said in (False, True, None):
        beat = m.Beat(0, 0, -1, -1.0, -1.0, 0.0, 0, warm=said)
        job.feed(ev.BeatReceived(job.node_of["a"], beat))
        assert warm() is said
    job.feed(ev.BeatReceived(job.node_of["a"], m.Beat(0, 0, -1, -1.0, -1.0, 0.0, 0, warm=True)))
    job.leave("a")
    assert warm() is None
