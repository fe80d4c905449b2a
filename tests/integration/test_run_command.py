# SPDX-License-Identifier: Apache-2.0
"""`holdfast run` as a user meets it: signals, output, kinds of programs, torchrun's contract."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import LIMIT_S, SCRIPTS, Jobs, playground
from tests.waiting import until

STEPS = str(SCRIPTS / "steps.py")
TALK = str(SCRIPTS / "talk.py")
DUMP = str(SCRIPTS / "dump_environment.py")

BOUNDED_S = 60.0
"""Far below the minutes that a hang would take, far above the second that it does take."""

EQUAL_TO_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


# ---- stopping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--local-nodes", "2")], ids=["alone", "local nodes"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(
    jobs: Jobs, number: signal.Signals, options: tuple[str, ...]
) -> None:
    nproc = ("--nproc-per-node", "1" if options else "2")
    job = jobs.run(*options, *nproc, STEPS)
    jobs.wait_world(2)
    if number == signal.SIGINT:
        job.interrupt()
    else:
        job.send(number)
    assert job.wait(BOUNDED_S) == 128 + number
    assert "Traceback" not in job.text
    jobs.expect_nothing_left(BOUNDED_S)


def test_ctrl_c_works_before_the_workers_run(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node", "2", STEPS)
    job.wait_line("the master serves")
    job.interrupt()
    assert job.wait(BOUNDED_S) == 130
    jobs.expect_nothing_left(BOUNDED_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_works_while_the_master_comes_up(jobs: Jobs, number: signal.Signals) -> None:
    """It is passed on to a master that dies of it, being too young to end the job in order."""
    job = jobs.run("--grace", "600", "--local-nodes", "2", STEPS)
    until(lambda: psutil.Process(job.pid).children(), LIMIT_S, "the master")
    job.send(number)
    assert job.wait(LIMIT_S) == 128 + number
    assert "Traceback" not in job.text
    jobs.expect_nothing_left(BOUNDED_S)


@pytest.mark.parametrize("options", [(), ("--local-nodes", "2")], ids=["alone", "local nodes"])
def test_a_worker_that_ignores_signals_ends_after_the_grace(
    jobs: Jobs, options: tuple[str, ...]
) -> None:
    job = jobs.run("--grace", "1", *options, str(SCRIPTS / "stubborn.py"))
    jobs.wait_world(2 if options else 1)
    job.interrupt()
    assert job.wait(BOUNDED_S) == 130
    jobs.expect_nothing_left(BOUNDED_S)


def test_workers_have_the_grace_to_save_their_work(jobs: Jobs) -> None:
    script = jobs.write(
        "saving.py",
        "import pathlib, signal, threading\n"
        "def save(*_):\n"
        "    print('saved', flush=True)\n"
        "    raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('works', flush=True)\n"
        "signal.pause()\n",
    )
    job = jobs.run(script)
    job.wait_line("works")
    job.send(signal.SIGTERM)
    assert job.wait(BOUNDED_S) == 143
    assert "[rank0] saved" in job.out


# ---- output -------------------------------------------------------------------------------------


def files_of(folder: Path, round: int = 1) -> dict[tuple[int, str], list[str]]:
    """The lines of each rank's output files."""
    found = {}
    for path in folder.glob(f"*/round_{round}/rank_*/std*.log"):
        rank = int(path.parent.name.removeprefix("rank_"))
        found[rank, path.stem] = path.read_text().splitlines()
    return found


def expect_complete(lines: list[str], name: str, rank: int, count: int, prefix: str = "") -> None:
    """Not a line of scripts/talk.py is missing, doubled or out of order."""
    start = f"{prefix}{name} {rank} "
    *numbered, last = [line.removeprefix(start) for line in lines]
    assert [int(line[:7]) for line in numbered] == list(range(count))
    assert last == "end"


def test_big_output_is_complete_in_files_and_on_the_console(jobs: Jobs) -> None:
    """10 MB on each stream, and the worker exits right after the last byte."""
    count = 100_000
    logs = jobs.folder / "logs"
    job = jobs.run("--log-dir", str(logs), TALK, LINES_TO_PRINT=str(count))
    job.succeeds()
    files = files_of(logs)
    assert set(files) == {(0, "stdout"), (0, "stderr")}
    expect_complete(files[0, "stdout"], "out", 0, count)
    expect_complete(files[0, "stderr"], "err", 0, count)
    expect_complete(job.out, "out", 0, count, "[rank0] ")
    shown = [line for line in job.err if line.startswith("[rank0] ")]
    expect_complete(shown, "err", 0, count, "[rank0] ")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("", "out 0, out 1, err 0, err 1"),
        ("--local-ranks-filter 0", "out 0, err 0"),
        ("--redirects 3", ""),
        ("--redirects 1", "err 0, err 1"),
        ("--redirects 0:3,1:2", "out 1"),
        ("--redirects 3 --tee 0:1", "out 0"),
        ("--tee 3", "out 0, out 1, err 0, err 1"),
    ],
)
def test_the_console_shows_what_was_asked_for(jobs: Jobs, options: str, shown: str) -> None:
    logs = jobs.folder / "logs"
    where = ("--nproc-per-node", "2", "--log-dir", str(logs))
    job = jobs.run(*where, *options.split(), TALK, LINES_TO_PRINT="3")
    job.succeeds()
    streams = {("out", line) for line in job.out} | {("err", line) for line in job.err}
    seen = {line[8:13] for stream, line in streams if line[8:11] == stream}
    assert seen == set(filter(None, shown.split(", ")))
    files = files_of(logs)
    assert len(files) == 4
    for (rank, stream), lines in files.items():
        expect_complete(lines, stream.removeprefix("std"), rank, 3)


def test_the_output_of_a_failed_job_is_kept(jobs: Jobs) -> None:
    job = jobs.run("--max-restarts", "0", STEPS, FAULTS="raise import 0")
    assert job.wait() == 1
    line = job.wait_line("the output of every rank is in ")
    logs = Path(line.partition(" is in ")[2])
    assert "RuntimeError: the loss of rank 0 is not a number" in files_of(logs)[0, "stderr"]


# ---- programs -----------------------------------------------------------------------------------

SHOW = """
import json, os, sys
print(json.dumps([__name__, __package__, os.path.basename(sys.argv[0]), *sys.argv[1:]]))
"""


def shown_by(jobs: Jobs, *words: str) -> object:
    job = jobs.run(*words)
    job.succeeds()
    return json.loads(job.out[0].removeprefix("[rank0] "))


SILENT = "import signal\nprint('up', flush=True)\nsignal.pause()\n"


def test_a_job_that_stands_still_at_its_start_is_said_and_shown_with_its_logs(jobs: Jobs) -> None:
    logs = jobs.folder / "logs"
    flags = ("--first-step-within=1", f"--log-dir={logs}")
    job = jobs.run(*flags, jobs.write("silent.py", SILENT))
    job.wait_line("round 1: not every worker has reported a step in 1 s")
    status = jobs.start("status", "--json")
    status.succeeds()
    view = json.loads(status.out[0])
    assert view["progress"]["incidents"][0]["reason"] == "no first step within 1 s"
    (node,) = view["nodes"]
    assert node["log_dir"].startswith(str(logs))
    assert node["memory_bytes"] > 0
    assert node["beat_age_s"] >= 0
    text = jobs.start("status")
    text.succeeds()
    assert text.count(f"^logs: {logs}") == 1, text.text
    assert job.is_running()


def test_a_script_gets_its_arguments(jobs: Jobs) -> None:
    jobs.write("show.py", SHOW)
    expected = ["__main__", None, "show.py", "--nnodes", "7", "a b"]
    assert shown_by(jobs, "show.py", "--nnodes", "7", "a b") == expected


def test_a_module_is_run_like_python_m(jobs: Jobs) -> None:
    jobs.write("pack/__init__.py", "")
    jobs.write("pack/show.py", SHOW)
    jobs.write("pack/__main__.py", SHOW)
    assert shown_by(jobs, "-m", "pack.show", "x") == ["__main__", "pack", "show.py", "x"]
    assert shown_by(jobs, "--module", "pack") == ["__main__", "pack", "__main__.py"]


def test_run_path_runs_a_script(jobs: Jobs) -> None:
    jobs.write("show.py", SHOW)
    shown = shown_by(jobs, "--run-path", "show.py", "x")
    assert isinstance(shown, list)
    assert shown[0] == "__main__"
    assert shown[2:] == ["show.py", "x"]


def test_no_python_runs_a_program(jobs: Jobs) -> None:
    program = jobs.write("program.sh", '#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $1"\n')
    os.chmod(program, 0o700)
    job = jobs.run("--nproc-per-node", "2", "--no-python", program, "hello")
    job.succeeds()
    assert sorted(job.out) == ["[rank0] rank 0 of 2: hello", "[rank1] rank 1 of 2: hello"]


def test_a_program_that_fails_is_restarted_too(jobs: Jobs) -> None:
    program = jobs.write("program.sh", "#!/bin/sh\n[ $TORCHELASTIC_RESTART_COUNT = 1 ] || exit 1\n")
    os.chmod(program, 0o700)
    job = jobs.run("--no-python", program)
    job.succeeds()
    job.wait_line("round 2: every worker finished")


def test_two_jobs_run_on_one_machine(jobs: Jobs) -> None:
    with playground() as beside:
        one = jobs.run("--nproc-per-node", "2", STEPS)
        other = beside.run("--nproc-per-node", "2", STEPS)
        first, unharmed = jobs.wait_world(2), beside.wait_world(2)
        os.kill(first[0].pid, signal.SIGKILL)
        jobs.wait_world(2, after=first)
        jobs.finish()
        one.succeeds()
        beside.wait_for("step", lambda event: event.step > unharmed[0].step + 3)
        beside.finish()
        other.succeeds()
        assert {event.round for event in beside.events()} == {1}
        assert jobs.events()[0].agent != beside.events()[0].agent
        beside.expect_nothing_left()


def test_a_master_that_cannot_serve_ends_the_command(jobs: Jobs) -> None:
    options = ("--job", "mine", "--state", str(jobs.folder / "state"), "--grace", "0")
    first = jobs.run(*options, STEPS)
    jobs.wait_world(1)
    second = jobs.run(*options, STEPS)
    assert second.wait() == 1
    assert "is in use by another master" in second.err[0]
    assert "Traceback" not in second.text
    jobs.finish()
    first.succeeds()


# ---- torchrun's contract ------------------------------------------------------------------------


def dumped(folder: Path) -> dict[int, dict[str, str]]:
    """The environments that scripts/dump_environment.py left, by rank."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_workers_have_the_environment_that_torchrun_gives(jobs: Jobs) -> None:
    ours, theirs = jobs.folder / "ours", jobs.folder / "theirs"
    ours.mkdir()
    theirs.mkdir()
    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--role", "trainer"]
    base = jobs.environment()
    del base["OMP_NUM_THREADS"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words, DUMP]
    subprocess.run(
        torchrun,
        env={**base, "DUMP_FOLDER": str(theirs)},
        cwd=jobs.folder,
        check=True,
        capture_output=True,
        timeout=240,
    )
    subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "run", *words, DUMP],
        env={**base, "DUMP_FOLDER": str(ours)},
        cwd=jobs.folder,
        check=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    expected, got = dumped(theirs), dumped(ours)
    assert set(expected) == set(got) == {0, 1}
    for rank, theirs_of_rank in expected.items():
        missing = set(theirs_of_rank) - set(got[rank])
        assert not missing
        more = set(got[rank]) - set(theirs_of_rank)
        assert all(name.startswith("HOLDFAST_") for name in more)
        for name in EQUAL_TO_TORCHRUN:
            assert got[rank][name] == theirs_of_rank[name], name
    assert got[0]["MASTER_PORT"] == got[1]["MASTER_PORT"]
    assert int(got[0]["MASTER_PORT"]) > 0
    assert got[0]["MASTER_ADDR"] == got[1]["MASTER_ADDR"]
    assert got[0]["TORCHELASTIC_ERROR_FILE"] != got[1]["TORCHELASTIC_ERROR_FILE"]
    assert got[0]["TORCHELASTIC_RUN_ID"] == got[1]["TORCHELASTIC_RUN_ID"] != ""


def test_the_error_file_of_torch_elastic_is_understood(jobs: Jobs) -> None:
    logs = jobs.folder / "logs"
    options = ("--nproc-per-node", "2", "--max-restarts", "0", "--log-dir", str(logs))
    job = jobs.run(*options, str(SCRIPTS / "recorded.py"))
    assert job.wait() == 1
    files = list(logs.glob("*/round_1/rank_1/error.json"))
    assert len(files) == 1
    message = json.loads(files[0].read_text())["message"]
    assert message["message"] == "ValueError: no learning rate was given"
    failure = next(n for n, line in enumerate(job.err) if line.startswith("The first failure: "))
    assert "rank 1 on node rank 0" in job.err[failure]
    assert "failed with ValueError: no learning rate was given" in job.err[failure]
    assert "ValueError: no learning rate was given" in job.err[failure + 1 :]
