# SPDX-License-Identifier: Apache-2.0
"""A typo, a missing module and a wrong flag are run once; a killed loader process is a kill."""

import pytest

from tests.integration.jobs import Jobs

ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.parse_args()
"""

OWN_PARSER = """
import argparse, sys
class Parser(argparse.ArgumentParser):
    def error(self, text):
        self.print_usage(sys.stderr)
        self.exit(2)
Parser().parse_args()
"""

LOADER = """
import os, signal
import torch
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, at):
        if at == 40 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return at

for batch in DataLoader(Numbers(), batch_size=4, num_workers=1):
    pass
print("read all")
"""


@pytest.mark.parametrize(
    ("script", "words", "shown", "reason"),
    [
        (ARGUMENTS, ("--lrr", "3"), "usage: mistaken.py", "unrecognized arguments: --lrr 3"),
        (OWN_PARSER, ("--lrr", "3"), "usage: mistaken.py", "its arguments were refused"),
        ("import toch\n", (), "import toch", "ModuleNotFoundError: No module named 'toch'"),
        ("x = = 3\n", (), "x = = 3", "SyntaxError: invalid syntax"),
    ],
)
def test_a_mistake_is_run_once_and_shown_once(
    jobs: Jobs, script: str, words: tuple[str, ...], shown: str, reason: str
) -> None:
    job = jobs.run("--nproc-per-node=4", jobs.write("mistaken.py", script), *words)
    assert job.wait() == 1
    assert job.text.count(shown) == 1, job.text
    (end,) = [line for line in job.err if "the job failed" in line]
    assert reason in end
    assert "the same on 4 ranks, before the first step" in end
    assert job.count("round 2") == 0


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        ("nomodule_x", "No module named nomodule_x"),
        ("nomodule_x.y", "No module named nomodule_x.y"),
        ("broken_x.sub", "import toch"),
    ],
)
def test_a_module_that_cannot_be_run_is_run_once(jobs: Jobs, module: str, shown: str) -> None:
    jobs.write("broken_x/__init__.py", "import toch\n")
    jobs.write("broken_x/sub.py", "")
    job = jobs.run("--nproc-per-node=2", "-m", module)
    assert job.wait() == 1
    assert job.count(rf"\[rank\d\] .*{shown}") == 1, job.text
    (end,) = [line for line in job.err if "the job failed" in line]
    assert "ModuleNotFoundError: No module named" in end
    assert "the same on 2 ranks, before the first step" in end
    assert job.count("round 2") == 0


def test_a_mistake_on_two_nodes_is_run_once(jobs: Jobs) -> None:
    job = jobs.run("--local-nodes=2", "--nproc-per-node=2", jobs.write("m.py", "import toch\n"))
    assert job.wait() == 1
    assert job.count("the same on 4 ranks, before the first step") == 1
    assert job.count("round 2") == 0


def test_a_mistake_is_retried_on_request(jobs: Jobs) -> None:
    script = jobs.write("mistaken.py", "import toch\n")
    job = jobs.run("--nproc-per-node=2", "--max-restarts=1", "--retry-mistakes", script)
    assert job.wait() == 1
    assert job.count("the job failed: .*it failed 2 times; --max-restarts is 1") == 1


def test_an_error_of_all_ranks_is_shown_once(jobs: Jobs) -> None:
    script = jobs.write("wrong.py", "raise ImportError('the same everywhere')\n")
    job = jobs.run("--nproc-per-node=3", script)
    assert job.wait() == 1
    assert job.count(r"\[rank\d\] Traceback") == 1
    assert job.count(r"\[rank\d\] the same error ended ranks \d, \d") == 1


def test_a_killed_loader_process_takes_no_restart_of_the_program(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node=1", "--max-restarts=1", jobs.write("loader.py", LOADER))
    job.succeeds()
    assert job.count("round 1 is over: .*DataLoader worker") == 1
    assert job.count("read all") == 1


def test_ctrl_c_is_one_line(jobs: Jobs) -> None:
    script = jobs.write("waits.py", "import signal\nprint('up', flush=True)\nsignal.pause()\n")
    job = jobs.run("--nproc-per-node=2", script)
    job.wait_line("all workers run")
    job.wait_line("up", after=1)
    before = len(job.err)
    job.interrupt()
    assert job.wait() == 130
    assert len(job.err) == before + 1, job.text
    assert "holdfast: stopped by SIGINT" in job.err[-1]
