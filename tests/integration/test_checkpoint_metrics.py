# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told about the checkpoints of a real job."""

import json
import shutil

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.jobs import LIMIT_S, SCRIPTS, Jobs
from tests.waiting import until

COPIED = str(SCRIPTS / "copied.py")
PATIENCE = ("--beat", "0.3", "--silence", "5", "--lease", "8")


def scraped(jobs: Jobs) -> dict[tuple[str, ...], float]:
    """The samples about checkpoints by the rest of their name and their labels."""
    (note,) = jobs.folder.glob("holdfast-*/jobs/test.*.json")
    address = json.loads(note.read_text())["http"]
    text = httpx.get(f"http://{address}/metrics", timeout=LIMIT_S).text
    prefix = "holdfast_checkpoint_"
    return {
        (sample.name.removeprefix(prefix), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def wait_samples(jobs: Jobs, wanted: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """All samples, as soon as all of `wanted` are among them: each node tells its own numbers, one
    later than the other."""

    def found() -> dict[tuple[str, ...], float] | None:
        samples = scraped(jobs)
        return samples if wanted.items() <= samples.items() else None

    return until(found, LIMIT_S, f"metrics with {wanted}")


def test_a_lost_node_costs_the_steps_that_were_not_copied_and_metrics_tell_it_all(
    jobs: Jobs,
) -> None:
    """`replicate_every=3`: the survivor has step 8, and both go on from the copies of step 6."""
    memories = {name: jobs.folder / f"memory-{name}" for name in "ab"}
    for memory in memories.values():
        memory.mkdir()
    master = jobs.master(*PATIENCE)

    def start(name: str, memory: str) -> None:
        words = ("--nnodes", "2", "--nproc-per-node", "1", "--no-spares", COPIED)
        folder = str(memories[memory])
        jobs.node(master, *words, name=name, HOLDFAST_MEMORY_DIR=folder)

    start("a", "a")
    start("b", "b")
    jobs.wait_for("step", lambda event: event.step == 8, count=2)
    saved = {("step", "memory"): 8, ("memory_saves_total",): 8, ("step", "peers"): 6}
    before = wait_samples(jobs, saved)
    assert 0 < before["memory_save_seconds_total",] < LIMIT_S
    assert 0 <= before["age_seconds", "memory"] < LIMIT_S
    assert before["step", "storage"] == -1
    assert ("age_seconds", "storage") not in before

    jobs.kill_all(node="b")
    shutil.rmtree(memories["b"])
    memories["b"].mkdir()
    start("b2", "b")
    again = jobs.wait_for("loaded", lambda event: event.round > 1, count=2)
    assert {event.step for event in again} == {6}
    jobs.wait_for("step", lambda event: event.round > 1, count=2)

    restored = {("restored_parts_total", source): 1.0 for source in ("memory", "peer")}
    steps = {("step", "storage"): 6, ("step", "memory"): 7, ("memory_saves_total",): 9}
    after = wait_samples(jobs, restored | steps)
    assert after["restored_parts_total", "storage"] == 0
    assert after["commits_total",] == 1
    assert after["failed_attempts_total",] == 0
    assert after["written_bytes_total",] > 2 * 8000
    assert after["write_seconds_total",] > 0
    assert 0 <= after["age_seconds", "storage"] < LIMIT_S
    jobs.finish()
    jobs.wait_for("step", lambda event: event.round > 1, count=2)
    assert master.wait(LIMIT_S) == 0
