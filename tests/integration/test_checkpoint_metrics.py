# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told about the checkpoints of a real job."""

import json
import shutil

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.jobs import SCRIPTS, Jobs, wait_gone
from tests.waiting import until

COPIED = str(SCRIPTS / "copied.py")
LIMIT_S = 60.0
PATIENCE = ("--beat", "0.3", "--silence", "5", "--lease", "8")


def scraped(jobs: Jobs) -> dict[tuple[str, ...], float]:
    """The samples about checkpoints by the rest of their name and their labels."""
    (note,) = jobs.folder.glob("holdfast-*/jobs/test.*.json")
    text = httpx.get(f"http://{json.loads(note.read_text())['http']}/metrics").text
    prefix = "holdfast_checkpoint_"
    return {
        (sample.name.removeprefix(prefix), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def wait_sample(jobs: Jobs, *name: str, value: float) -> dict[tuple[str, ...], float]:
    def found() -> dict[tuple[str, ...], float] | None:
        samples = scraped(jobs)
        return samples if samples.get(name) == value else None

    return until(found, LIMIT_S, lambda: f"{name} is not {value}: {scraped(jobs)}")


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
    wait_sample(jobs, "step", "peers", value=6)
    before = wait_sample(jobs, "step", "memory", value=8)
    assert before["memory_saves_total",] == 8
    assert 0 < before["memory_save_seconds_total",] < LIMIT_S
    assert 0 <= before["age_seconds", "memory"] < LIMIT_S
    assert before["step", "storage"] == -1
    assert ("age_seconds", "storage") not in before

    mine = [p for p in jobs.living() if p.environ().get("STEPS_NODE") == "b"]
    for process in mine:
        process.kill()
    wait_gone([process.pid for process in mine])
    shutil.rmtree(memories["b"])
    memories["b"].mkdir()
    start("b2", "b")
    again = jobs.wait_for("loaded", lambda event: event.round > 1, count=2)
    assert {event.step for event in again} == {6}
    jobs.wait_for("step", lambda event: event.round > 1, count=2)

    wait_sample(jobs, "step", "storage", value=6)
    after = wait_sample(jobs, "step", "memory", value=7)
    assert after["memory_saves_total",] == 9
    assert after["restored_parts_total", "memory"] == 1
    assert after["restored_parts_total", "peer"] == 1
    assert after["restored_parts_total", "storage"] == 0
    assert after["commits_total",] == 1
    assert after["failed_attempts_total",] == 0
    assert after["written_bytes_total",] > 2 * 8000
    assert after["write_seconds_total",] > 0
    assert 0 <= after["age_seconds", "storage"] < LIMIT_S
    jobs.finish()
    jobs.wait_for("step", lambda event: event.round > 1, count=2)
    assert master.wait(LIMIT_S) == 0
