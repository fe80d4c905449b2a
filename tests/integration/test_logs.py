# SPDX-License-Identifier: Apache-2.0
"""Where the logs of whole jobs are, and that they are in nobody's way."""

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import LIMIT_S, SCRIPTS, Jobs
from tests.waiting import until

STEPS = str(SCRIPTS / "steps.py")


def test_a_log_folder_that_is_gone_does_not_keep_the_next_master_from_serving(jobs: Jobs) -> None:
    logs = jobs.folder / "logs"
    job = jobs.run("--job", "b", "--log-dir", str(logs), "--nproc-per-node", "2", STEPS)
    before = jobs.wait_world(2)
    logs.rename(jobs.folder / "old")
    logs.touch()
    (master,) = jobs.running("master")
    master.send_signal(signal.SIGKILL)
    job.wait_line("the master serves as generation", after=1)
    job.wait_line(f"the log {logs}/b/master.log is not written")
    jobs.finish()
    job.succeeds()
    assert {event.pid for event in jobs.steps()} == {event.pid for event in before}


def test_a_launcher_that_gives_up_keeps_the_logs_and_says_where(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node", "1", STEPS)
    jobs.wait_world(1)

    def gave_up() -> bool:
        for master in jobs.running("master"):
            with suppress(psutil.NoSuchProcess):
                master.kill()
        return not job.is_running()

    until(gave_up, LIMIT_S)
    assert job.wait() == 1
    said = job.wait_line("the output of every rank is in ")
    (folder,) = Path(said.rpartition(" is in ")[2]).iterdir()
    assert "the master died " in (folder / "agent.log").read_text().splitlines()[-1]
    assert sum(len(files) for _, _, files in os.walk(folder)) > 2
    jobs.expect_nothing_left()


def test_a_node_that_is_refused_has_the_reason_in_its_log(jobs: Jobs) -> None:
    master = jobs.master()
    wrong = jobs.write("token", "0" * 64)
    Path(wrong).chmod(0o600)
    where = ("--master", master.address, "--token-file", wrong, "--job", "j")
    node = jobs.run(*where, "--nnodes", "1", "--log-dir", str(jobs.folder / "logs"), STEPS)
    assert node.wait() == 2
    (log,) = (jobs.folder / "logs" / "j").glob("agent-*.log")
    assert "ERROR no master of this job" in log.read_text()


def test_a_master_that_cannot_serve_has_the_reason_in_its_log(jobs: Jobs) -> None:
    first = jobs.master()
    words = ("--job", "j", "--state", str(jobs.folder / "other"), "--log-dir", str(jobs.folder))
    second = jobs.start("master", "--listen", first.address, *words)
    assert second.wait() == 1
    assert "ERROR cannot listen on" in (jobs.folder / "master.log").read_text()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"DLROVER_LOG_LEVEL": "WARN"}, []),
        ({"DLROVER_LOG_LEVEL": "loud"}, ["'loud' is no level", "the master serves"]),
        ({"DLROVER_LOG_LEVEL": "WARN", "HOLDFAST_LOG_LEVEL": "info"}, ["the master serves"]),
    ],
)
def test_a_master_reads_the_level_of_dlrover_too(
    jobs: Jobs, env: dict[str, str], said: list[str]
) -> None:
    master = jobs.master(**env)
    master.send(signal.SIGTERM)
    assert master.wait() == 143
    assert all(text in master.text for text in said)
    assert ("the master serves" in master.text) == bool(said)


def test_a_master_by_hand_has_its_log_where_it_was_told_to(jobs: Jobs) -> None:
    logs = jobs.folder / "logs"
    master = jobs.master("--log-dir", str(logs), HOLDFAST_LOG_LEVEL="debug")
    # A node of it on the same folder: nodes may share one.
    node = jobs.node(master, "--nnodes", "1", "--job", "j", "--log-dir", str(logs), STEPS)
    jobs.wait_world(1)
    jobs.finish()
    node.succeeds()
    master.succeeds()
    text = (logs / "master.log").read_text()
    assert "INFO master: round 1: " in text
    assert "DEBUG master: AttachRequested" in text
    assert "AttachRequested" not in master.text
    assert (logs / "j" / f"agent-{socket.gethostname()}-{node.pid}.log").is_file()
    # By hand, a log that cannot be is a mistake of the person.
    words = ("--job", "j", "--state", str(jobs.folder / "other"), "--log-dir", str(jobs.log))
    refused = jobs.start("master", *words)
    assert refused.wait() == 2
    assert "there is no log file" in refused.text
