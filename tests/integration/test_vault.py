# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in memory and on storage, through real agents: whatever dies, the state is whole.

The workers (scripts/vaulted.py) prove every byte that they restore. Faults come from inside them at
exact points: in the middle of a copy, after the slot is sealed, after the step.
"""

import os
import shutil
import signal
import threading
from pathlib import Path

import psutil
import pytest

from holdfast.checkpoint.digests import read_sidecar
from tests.disks import remove_slots
from tests.integration.jobs import LIMIT_S, SCRIPTS, Event, Jobs
from tests.waiting import until

VAULTED = str(SCRIPTS / "vaulted.py")


def memory_of(jobs: Jobs) -> list[Path]:
    """What the agents of this test hold in shared memory now."""
    return [path for path in (jobs.folder / "memory").rglob("*.*") if path.is_file()]


def start(jobs: Jobs, *words: str, **env: str) -> dict[str, str]:
    """The environment of every node of a test."""
    memory = jobs.folder / "memory"
    memory.mkdir(exist_ok=True)
    return {
        "VAULT_DIRECTORY": str(jobs.folder / "checkpoints"),
        "HOLDFAST_MEMORY_DIR": str(memory),
        **env,
    }


def restored(jobs: Jobs, *, round: int) -> dict[int, Event]:
    return {event.rank: event for event in jobs.events("restored") if event.round == round}


def sources(jobs: Jobs, *, round: int) -> set[str]:
    return {
        event.what.removeprefix("from ")
        for event in jobs.events()
        if event.what.startswith("from ") and event.round == round
    }


@pytest.mark.parametrize(
    ("place", "shared", "steps"),
    [
        ("copy", "0", {2}),
        ("sealed", "0", {2, 3}),
        ("step", "0", {4}),
        # The shared part of step 3 may be whole when the own part of a rank is torn.
        ("copy", "1", {2, 3}),
        ("step", "1", {4}),
    ],
)
def test_a_worker_killed_at_any_point_goes_on_from_memory(
    jobs: Jobs, place: str, shared: str, steps: set[int]
) -> None:
    """The prior art's single buffer is torn by a kill in the middle of a copy."""
    env = start(jobs, FAULTS=f"kill {place} 1", STEPS="6", VAULT_SHARED=shared)
    if place == "step":
        # The newest is what is restored: a worker that starts has it mapped before it asks.
        env["VAULT_AHEAD"] = "1"
    job = jobs.run("--nproc-per-node", "2", "--max-restarts", "2", VAULTED, **env)
    job.succeeds()
    again = {event.step for event in restored(jobs, round=2).values()}
    assert len(again) == 1
    assert again <= steps
    assert sources(jobs, round=2) == {"memory"}
    assert not memory_of(jobs)


def test_everything_killed_goes_on_from_storage(jobs: Jobs) -> None:
    env = start(jobs, VAULT_EVERY="2")
    job = jobs.run("--nproc-per-node", "2", VAULTED, **env)
    latest = jobs.folder / "checkpoints" / "latest"
    until(latest.exists, LIMIT_S)
    jobs.kill_all()
    job.wait()
    newest = int(latest.read_text().removeprefix("step-"))
    shutil.rmtree(jobs.folder / "memory")
    jobs.log.write_text("")
    shutil.rmtree(jobs.folder / "meetings")
    job = jobs.run("--nproc-per-node", "2", VAULTED, **start(jobs, STEPS=str(newest + 3)))
    job.succeeds()
    assert {event.step for event in restored(jobs, round=1).values()} == {newest}
    assert sources(jobs, round=1) == {"storage"}


def test_sigterm_brings_the_newest_step_to_storage(jobs: Jobs) -> None:
    """Preemption: the node has its grace period to save what only its memory holds."""
    job = jobs.run("--nproc-per-node", "2", VAULTED, **start(jobs))
    jobs.wait_for("step", lambda event: event.step >= 3, count=2)
    job.send(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    saved = [event.step for event in jobs.events("saved")]
    stored = committed(jobs)
    # A rank may have been ended before it had saved its last step too.
    assert stored
    assert max(stored) >= max(saved) - 1
    assert not memory_of(jobs)


def committed(jobs: Jobs) -> list[int]:
    found = (jobs.folder / "checkpoints").glob("step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def test_the_job_ends_when_the_last_checkpoint_is_on_storage(jobs: Jobs) -> None:
    env = start(jobs, VAULT_EVERY="5", STEPS="5", VAULT_KEEP="1", VAULT_SLOTS="3")
    jobs.run("--nproc-per-node", "2", VAULTED, **env).succeeds()
    assert committed(jobs) == [5]
    assert (jobs.folder / "checkpoints" / "latest").read_text() == "step-0000000005"
    assert not memory_of(jobs)


def test_a_finished_job_leaves_its_newest_step_on_storage(jobs: Jobs) -> None:
    """Also when the program itself has never saved to storage."""
    jobs.run("--local-nodes", "2", VAULTED, **start(jobs, STEPS="5", VAULT_SHARED="0")).succeeds()
    assert committed(jobs)[-1] == 5
    assert not memory_of(jobs)


def test_storage_that_fails_disturbs_neither_training_nor_older_checkpoints(jobs: Jobs) -> None:
    env = start(jobs, VAULT_EVERY="2", STEPS="7")
    (jobs.folder / "checkpoints").mkdir()
    (jobs.folder / "checkpoints" / ".holdfast").write_text("a file where a directory should be")
    job = jobs.run("--nproc-per-node", "1", VAULTED, **env)
    job.succeeds()
    assert "checkpoints" in job.wait_line("does not go to storage")
    assert max(event.step for event in jobs.events("step")) == 7


@pytest.mark.parametrize("how", [{"VAULT_REPLICAS": "1"}, {"VAULT_PARITY": "2"}])
def test_a_lost_node_is_restored_from_its_peers(jobs: Jobs, how: dict[str, str]) -> None:
    """Its memory is gone with it, and nothing was ever on storage."""
    memories = [jobs.folder / f"memory-{name}" for name in "ab"]
    for memory in memories:
        memory.mkdir()
    env = start(jobs, VAULT_SHARED="0", VAULT_SLOTS="3", **how)
    words = ("--nnodes", "2", "--nproc-per-node", "2", VAULTED)
    master = jobs.master()
    jobs.node(master, *words, name="a", **{**env, "HOLDFAST_MEMORY_DIR": str(memories[0])})
    # It keeps its place, whether the next node comes before or after the second one is given up:
    # places go by the ranks of nodes, and those by the order in which they join.
    master.wait_line("node rank 0 joined")
    lost = jobs.node(master, *words, name="b", **{**env, "HOLDFAST_MEMORY_DIR": str(memories[1])})
    jobs.wait_for("step", lambda event: event.step >= 6, count=4)
    reached = max(event.step for event in jobs.events("step"))
    jobs.kill_all(node="b")
    lost.wait()
    shutil.rmtree(memories[1])
    memories[1].mkdir()
    jobs.node(master, *words, name="b2", **{**env, "HOLDFAST_MEMORY_DIR": str(memories[1])})
    again = jobs.wait_for("restored", lambda event: event.round > 1, count=4)
    assert len({event.step for event in again}) == 1
    assert again[0].step >= reached - 4
    source = "peer" if "VAULT_REPLICAS" in how else "parity"
    assert sources(jobs, round=again[0].round) == {"memory", source}
    jobs.finish()
    jobs.wait_for("end", lambda event: event.round == again[0].round, count=4)


def test_a_killed_agent_leaves_its_memory_to_its_successor(jobs: Jobs) -> None:
    env = start(jobs, VAULT_SHARED="0")
    job = jobs.run("--local-nodes", "2", VAULTED, **env)
    before = jobs.wait_for("step", lambda event: event.step >= 3, count=2)
    lost = next(event for event in before if event.rank == 1)
    os.kill(lost.agent, signal.SIGKILL)
    again = jobs.wait_for("restored", count=2)
    steps = {event.step for event in again}
    assert len(steps) == 1
    saved = [event.step for event in jobs.events("saved") if event.round == 1]
    assert max(saved) - 1 <= steps.pop() <= max(saved)
    assert sources(jobs, round=again[0].round) == {"memory"}
    jobs.finish()
    job.succeeds()
    assert not memory_of(jobs)


def test_memory_that_was_damaged_is_not_restored(jobs: Jobs) -> None:
    """A flipped byte in the newest slot: the step before is restored, and it is said."""
    env = start(jobs, VAULT_SHARED="0", VAULT_SLOTS="3", HOLD="4")
    job = jobs.run("--nproc-per-node", "1", "--max-restarts", "2", VAULTED, **env)
    (holds,) = jobs.wait_for("step", lambda event: event.step == 4)
    newest = until(lambda: digested(jobs, step=4), LIMIT_S)
    assert newest is not None
    with open(newest, "r+b") as slot:
        slot.seek(4096 + 1000)
        slot.write(b"!")
    os.kill(holds.pid, signal.SIGKILL)
    again = jobs.wait_for("restored", lambda event: event.round == 2)
    assert again[0].step == 3
    assert any("changed since" in event.what for event in jobs.events())
    jobs.go()
    jobs.finish()
    job.succeeds()


def test_saves_go_on_when_others_remove_the_memory(jobs: Jobs) -> None:
    """As systemd does at a logout, and batch systems do at the end of another job."""
    env = start(jobs, VAULT_SLOTS="3", VAULT_EVERY="6", HOLD="4")
    job = jobs.run("--nproc-per-node", "2", "--max-restarts", "1", VAULTED, **env)
    held = jobs.wait_for("step", lambda event: event.step == 4, count=2)
    remove_slots(jobs.folder / "memory")
    jobs.go()
    until(lambda: 6 in committed(jobs), LIMIT_S, "the step that is due on storage")
    jobs.wait_for("step", lambda event: event.step == 8 and event.round == 1, count=2)
    os.kill(held[0].pid, signal.SIGKILL)
    again = jobs.wait_for("restored", lambda event: event.round == 2, count=2)
    assert min(event.step for event in again) >= 7
    assert sources(jobs, round=2) == {"memory"}
    jobs.finish()
    job.succeeds()
    assert job.count("checkpoints in memory were removed by another program") == 1
    assert not memory_of(jobs)


def test_a_worker_that_dies_after_others_removed_the_memory_goes_on_from_storage(
    jobs: Jobs,
) -> None:
    env = start(jobs, VAULT_SLOTS="3", VAULT_EVERY="2", HOLD="5")
    job = jobs.run("--nproc-per-node", "2", "--max-restarts", "1", VAULTED, **env)
    held = jobs.wait_for("step", lambda event: event.step == 5, count=2)
    until(lambda: 4 in committed(jobs), LIMIT_S, "a step on storage")
    remove_slots(jobs.folder / "memory")
    os.kill(held[0].pid, signal.SIGKILL)
    again = jobs.wait_for("restored", lambda event: event.round == 2, count=2)
    assert {event.step for event in again} == {4}
    assert sources(jobs, round=2) == {"storage"}
    jobs.go()
    jobs.finish()
    job.succeeds()
    assert not memory_of(jobs)


def test_what_has_no_digest_yet_gets_one_before_it_is_restored(jobs: Jobs) -> None:
    """As when an agent dies before it has computed the digest of a save that came without one."""
    env = start(jobs, VAULT_SHARED="0", HOLD="4")
    job = jobs.run("--local-nodes", "2", VAULTED, **env)
    held = jobs.wait_for("step", lambda event: event.step == 4, count=2)
    until(lambda: digested(jobs, step=4, rank=1), LIMIT_S, "the digest of the newest slot")
    for sidecar in (jobs.folder / "memory").rglob("rank-00001.*.crc"):
        sidecar.unlink()
    os.kill(next(event for event in held if event.rank == 1).agent, signal.SIGKILL)
    again = jobs.wait_for("restored", lambda event: event.round > 1, count=2)
    assert {event.step for event in again} == {4}
    assert sources(jobs, round=again[0].round) == {"memory"}
    jobs.finish()
    job.succeeds()


def digested(jobs: Jobs, *, step: int, rank: int = 0) -> Path | None:
    """The slot with this step, once its digest is beside it."""
    for path in (jobs.folder / "memory").rglob(f"rank-0000{rank}.*"):
        if path.suffix == ".crc":
            continue
        sidecar = read_sidecar(path)
        if sidecar is not None and sidecar.version.step == step:
            return path
    return None


def test_an_idle_vault_uses_no_cpu(jobs: Jobs) -> None:
    env = start(jobs, VAULT_SHARED="0", HOLD="4")
    job = jobs.run("--nproc-per-node", "1", VAULTED, **env)
    jobs.wait_for("step", lambda event: event.step == 4)
    agent = psutil.Process(job.pid)

    def is_idle() -> bool:
        """For a second. At first it has things to do: digests, a warm spare."""
        before = sum(agent.cpu_times()[:2])
        threading.Event().wait(1.0)
        return sum(agent.cpu_times()[:2]) - before < 0.1

    until(is_idle, LIMIT_S)


def test_a_job_that_fails_for_good_leaves_its_newest_step_on_storage(jobs: Jobs) -> None:
    """Its memory goes with it, so what only memory holds goes to storage first."""
    env = start(jobs, FAULTS="raise step 0", VAULT_SHARED="0")
    job = jobs.run("--nproc-per-node", "2", "--max-restarts", "0", VAULTED, **env)
    assert job.wait() == 1
    assert committed(jobs) == [4]
    assert not memory_of(jobs)
