# SPDX-License-Identifier: Apache-2.0
"""What a person sees and types: progress bars that move, and a debugger that answers."""

import re
import signal

import pytest

from tests.integration.jobs import Jobs
from tests.integration.terminals import TerminalCommand

BAR = """
import os, sys, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.01)
sys.stderr.write("\\r\\x1b[32mepoch  10%\\x1b[0m")
sys.stderr.flush()
wait("first")
sys.stderr.write("\\r\\x1b[32mepoch  20%\\x1b[0m")
sys.stderr.flush()
wait("second")
sys.stderr.write("\\r\\x1b[32mepoch 100%\\x1b[0m\\n")
"""

DEBUGGED = """
import os
answer = 40 + int(os.environ["RANK"])
if os.environ["RANK"] == os.environ["DEBUGGED"]:
    breakpoint()
print("the answer is", answer)
"""

KILLED_AT_A_PROMPT = """
import os, signal, sys, termios
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    # As a prompt with line editing leaves the terminal.
    modes = termios.tcgetattr(0)
    modes[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(0, termios.TCSANOW, modes)
    os.kill(os.getpid(), signal.SIGKILL)
print("modes", termios.tcgetattr(0)[3], input("name? "))
"""


@pytest.mark.parametrize("workers", [1, 4])
def test_a_bar_is_seen_moving_on_a_terminal(jobs: Jobs, workers: int) -> None:
    job = TerminalCommand(jobs, "run", f"--nproc-per-node={workers}", jobs.write("bar.py", BAR))
    for rank in range(workers):
        prefix = rf"\[rank{rank}\] " if workers > 1 else ""
        job.wait_text(rf"{prefix}\x1b\[32mepoch  10%")
    jobs.write("first", "")
    for rank in range(workers):
        prefix = rf"\[rank{rank}\] " if workers > 1 else ""
        job.wait_text(rf"{prefix}\x1b\[32mepoch  20%")
    jobs.write("second", "")
    assert job.wait() == 0, job.text
    assert job.text.count("epoch 100%") == workers


def test_a_bar_on_a_pipe_is_a_line_now_and_then(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node=2", jobs.write("bar.py", BAR))
    for rank in range(2):
        job.wait_line(rf"\[rank{rank}\] .*epoch  10%")
    jobs.write("first", "")
    jobs.write("second", "")
    job.succeeds()
    assert len([line for line in job.err if "epoch 100%" in line]) == 2
    assert len([line for line in job.err if "epoch" in line]) <= 6


def test_a_single_worker_has_the_terminal(jobs: Jobs) -> None:
    script = jobs.write("debugged.py", DEBUGGED)
    job = TerminalCommand(jobs, "run", script, DEBUGGED="0")
    job.wait_text(r"\(Pdb\) ")
    job.type("p answer + 2\n")
    job.wait_text(r"42\r\n")
    job.type("c\n")
    assert job.wait() == 0, job.text
    assert "the answer is 40" in job.text
    assert "[rank0]" not in job.text


def test_a_rank_is_debugged_beside_others(jobs: Jobs) -> None:
    script = jobs.write("debugged.py", DEBUGGED)
    flags = ("--nproc-per-node=2", "--debug-rank=1")
    job = TerminalCommand(jobs, "run", *flags, script, DEBUGGED="1")
    job.wait_text(r"rank 1 has this terminal; no hang is looked for")
    job.wait_text(r"\(Pdb\) ")
    job.type("p answer + 2\n")
    job.wait_text(r"43\r\n")
    job.type("c\n")
    assert job.wait() == 0, job.text
    assert "[rank0] the answer is 40" in job.text


def test_a_worker_killed_at_a_prompt_leaves_the_terminal_as_it_was(jobs: Jobs) -> None:
    script = jobs.write("killed.py", KILLED_AT_A_PROMPT)
    job = TerminalCommand(jobs, "run", script)
    job.wait_text(r"name\? ")
    assert job.modes == job.modes_before
    job.type("Ada\n")
    assert job.wait() == 0, job.text
    assert re.search(rf"modes {job.modes_before} Ada", job.text)


def test_ctrl_c_at_a_prompt_ends_the_job(jobs: Jobs) -> None:
    script = jobs.write("debugged.py", DEBUGGED)
    job = TerminalCommand(jobs, "run", script, DEBUGGED="0")
    job.wait_text(r"\(Pdb\) ")
    job.type("\x03")
    assert job.wait() == 128 + signal.SIGINT, job.text


@pytest.mark.parametrize("way", ["breakpoint()", "import pdb; pdb.set_trace()", "input()"])
def test_a_prompt_without_a_terminal_is_explained(jobs: Jobs, way: str) -> None:
    script = jobs.write("prompt.py", f"{way}\n")
    job = jobs.run("--nproc-per-node=1", "--max-restarts=0", script)
    assert job.wait() == 1
    assert "needs a terminal: use --nproc-per-node 1, or --debug-rank 0, on a terminal" in job.text


def test_a_debugger_of_the_users_choice_is_left_alone(jobs: Jobs) -> None:
    script = jobs.write("prompt.py", "breakpoint()\nprint('went on')\n")
    job = jobs.run("--nproc-per-node=2", script, PYTHONBREAKPOINT="0")
    job.succeeds()
    assert len([line for line in job.out if "went on" in line]) == 2


def test_a_rank_cannot_be_debugged_without_a_terminal(jobs: Jobs) -> None:
    job = jobs.run("--debug-rank=0", jobs.write("debugged.py", DEBUGGED))
    assert job.wait() == 2
    assert "--debug-rank needs a terminal" in job.text
