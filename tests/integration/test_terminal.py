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
print("on a terminal:", sys.stdout.isatty(), sys.stderr.isatty())
sys.stderr.write("\\r\\x1b[32mepoch  10%\\x1b[0m")
sys.stderr.flush()
wait("first")
sys.stderr.write("\\r\\x1b[32mepoch  20%\\x1b[0m")
sys.stderr.flush()
wait("second")
sys.stderr.write("\\r\\x1b[32mepoch 100%\\x1b[0m\\n")
"""

WAIT = """
import os, sys, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""

BARS = f"""{WAIT}
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm
console = Console()
console.print("[red]in red")
with Progress(console=console) as bars:
    outer, inner = bars.add_task("outer", total=100), bars.add_task("inner", total=100)
    bars.update(outer, completed=10)
    wait("first")
    bars.update(inner, completed=20)
    wait("second")
    if os.environ["RANK"] == "1" and "dies" in sys.argv:
        os.kill(os.getpid(), 9)
    print("said above")
    bars.update(outer, completed=100)
for step in tqdm(range(4), desc="steps", mininterval=0):
    if step == 2:
        wait("third")
"""

LIGHTNING = f"""{WAIT}
import torch
from lightning.pytorch import LightningModule, Trainer
class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        if index == 2:
            wait("first")
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.ones(8, 1))
flags = dict(logger=False, enable_checkpointing=False, enable_model_summary=False)
Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **flags).fit(Line(), data)
"""

WHERE = f"""{WAIT}
print("on a terminal:", sys.stdout.isatty(), sys.stderr.isatty(), flush=True)
if sys.stdout.isatty():
    before = os.get_terminal_size()
    print("size", before.columns, before.lines, flush=True)
    wait("first")
    print("resized", flush=True)
    while os.get_terminal_size() == before:
        time.sleep(0.01)
    print("size", os.get_terminal_size().columns, flush=True)
"""

DEBUGGED = """
import os
answer = 40 + int(os.environ["RANK"])
if os.environ["RANK"] == os.environ["DEBUGGED"]:
    breakpoint()
print("the answer is", answer)
"""

LATE_PROMPT = """
import os, time
from holdfast.client import report_step
for step in range(1, 4):
    report_step(step)
if os.environ["RANK"] == "0":
    breakpoint()
time.sleep(600)
"""

KILLED_AT_A_PROMPT = """
import os, signal, sys, termios
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    # As a prompt with line editing leaves the terminal.
    print("\\x1b[?25l", end="", flush=True)
    modes = termios.tcgetattr(0)
    modes[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(0, termios.TCSANOW, modes)
    os.kill(os.getpid(), signal.SIGKILL)
print("modes", termios.tcgetattr(0)[3], input("name? "))
"""


TQDM = f"""{WAIT}
from tqdm import tqdm
bar = tqdm(total=10, desc="epoch", mininterval=0, miniters=1)
bar.update()
wait("first")
bar.update()
wait("second")
bar.update(8)
bar.close()
"""


@pytest.mark.parametrize("workers", [1, 4])
def test_a_bar_is_seen_moving_on_a_terminal(jobs: Jobs, workers: int) -> None:
    job = TerminalCommand(jobs, "run", f"--nproc-per-node={workers}", jobs.write("bar.py", TQDM))
    bars = [rf"\[rank{rank}\] epoch: " if workers > 1 else "epoch: " for rank in range(workers)]
    for bar in bars:
        job.wait_text(rf"{bar} 10%")
    jobs.write("first", "")
    for bar in bars:
        job.wait_text(rf"{bar} 20%")
    jobs.write("second", "")
    assert job.wait() == 0, job.text
    assert all(re.search(rf"{bar}100%.*10/10", job.text) for bar in bars)


ROW = r"\[rank{rank}\] (\x1b\[[0-9;]*m)*{text}[^\r\n]*\D{percent}%"
"""A bar, whatever colours stand in it."""


def test_bars_of_rich_and_tqdm_move_in_colour(jobs: Jobs) -> None:
    script = jobs.write("bar.py", BARS)
    logs = jobs.folder / "logs"
    job = TerminalCommand(jobs, "run", "--nproc-per-node=2", f"--log-dir={logs}", script)
    for rank in range(2):
        job.wait_text(rf"\[rank{rank}\] \x1b\[31min red\x1b\[0m")
        job.wait_text(ROW.format(rank=rank, text="outer", percent=10))
    jobs.write("first", "")
    for rank in range(2):
        job.wait_text(ROW.format(rank=rank, text="inner", percent=20))
    jobs.write("second", "")
    for rank in range(2):
        job.wait_text(ROW.format(rank=rank, text="steps", percent=50))
    jobs.write("third", "")
    assert job.wait() == 0, job.text
    for rank in range(2):
        assert f"[rank{rank}] said above" in job.text
        assert re.search(ROW.format(rank=rank, text="outer", percent=100), job.text)
        assert re.search(ROW.format(rank=rank, text="steps", percent=100), job.text)
    # Of the cursor only the terminal's owner decides; the files have what was written.
    assert "\x1b[?25l" not in job.text
    (written,) = logs.glob("*/round_1/rank_0/stdout.log")
    assert b"\x1b[31min red\x1b[0m\n" in written.read_bytes()
    assert b"\x1b[?25l" in written.read_bytes()


def test_a_worker_killed_while_it_draws_leaves_the_terminal_as_it_was(jobs: Jobs) -> None:
    script = jobs.write("bar.py", BARS)
    flags = ("--nproc-per-node=2", "--max-restarts=0")
    job = TerminalCommand(jobs, "run", *flags, script, "dies")
    jobs.write("first", "")
    job.wait_text(ROW.format(rank=1, text="inner", percent=20))
    jobs.write("second", "")
    assert job.wait() == 1, job.text
    assert "rank 1 on node rank 0 was ended by SIGKILL" in job.text
    assert "\x1b[?25l" not in job.text
    assert job.text.count("\x1b[?7l") == job.text.count("\x1b[?7h")


@pytest.mark.soak
def test_a_bar_of_lightning_moves_on_a_terminal(jobs: Jobs) -> None:
    """It is one of tqdm, whose own is drawn in every run; a whole job of Lightning is in the
    tutorials."""
    job = TerminalCommand(jobs, "run", "--nproc-per-node=2", jobs.write("bar.py", LIGHTNING))
    job.wait_text(r"\[rank0\] [^\r\n]*Epoch 0/0[^\r\n]*[12]/4")
    jobs.write("first", "")
    assert job.wait() == 0, job.text
    assert re.search(r"\[rank0\] [^\r\n]*Epoch 0/0[^\r\n]*4/4", job.text)


def test_what_is_shown_on_a_terminal_is_written_to_one_of_its_size(jobs: Jobs) -> None:
    logs = jobs.folder / "logs"
    flags = ("--nproc-per-node=2", "--redirects=1:1", f"--log-dir={logs}")
    job = TerminalCommand(jobs, "run", *flags, jobs.write("where.py", WHERE))
    job.wait_text(r"\[rank0\] on a terminal: True True")
    job.wait_text(rf"\[rank0\] size {100 - len('[rank0] ')} 16")
    job.resize(24, 80)
    jobs.write("first", "")
    job.wait_text(rf"\[rank0\] size {80 - len('[rank0] ')}")
    assert job.wait() == 0, job.text
    (written,) = logs.glob("*/round_1/rank_1/stdout.log")
    assert written.read_text() == "on a terminal: False True\n"


LINES = """
import sys
print("on a terminal:", sys.stdout.isatty(), sys.stderr.isatty(), flush=True)
for number in range(40):
    sys.stderr.write(f"\\r\\x1b[2Kbar {number}")
    sys.stderr.flush()
    print("\\nline", number, flush=True)
"""


def test_nodes_on_one_terminal_lose_no_line(jobs: Jobs) -> None:
    """Each of them would draw on it as if it were its own."""
    flags = ("--local-nodes=2", "--nproc-per-node=1")
    job = TerminalCommand(jobs, "run", *flags, jobs.write("lines.py", LINES))
    assert job.wait() == 0, job.text
    for rank in range(2):
        assert f"[rank{rank}] on a terminal: False False" in job.text
        for number in range(40):
            assert f"[rank{rank}] line {number}\r\n" in job.text


def test_a_bar_on_a_pipe_is_a_line_now_and_then(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node=2", jobs.write("bar.py", BAR))
    for rank in range(2):
        job.wait_line(rf"\[rank{rank}\] .*epoch  10%")
    jobs.write("first", "")
    jobs.write("second", "")
    job.succeeds()
    assert len([line for line in job.out if "on a terminal: False False" in line]) == 2
    assert len([line for line in job.err if "epoch 100%" in line]) == 2
    assert len([line for line in job.err if "epoch" in line]) <= 6


OFTEN = """
import sys, time
began = time.monotonic()
for percent in range(101):
    sys.stderr.write(f"\\repoch {percent:3}%")
    sys.stderr.flush()
    time.sleep(0.02)
print("\\n", file=sys.stderr)
print("took", time.monotonic() - began)
"""


def test_a_bar_on_a_pipe_that_moves_often_is_few_lines(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node=2", jobs.write("bar.py", OFTEN))
    job.succeeds()
    for rank in range(2):
        took_s = float(job.wait_line(rf"\[rank{rank}\] took").split()[-1])
        shown = [line for line in job.err if f"[rank{rank}] epoch" in line]
        assert shown[-1].endswith("epoch 100%")
        assert len(shown) <= 3 + took_s / 5


def test_of_what_is_redirected_only_what_is_shown_too_is_on_a_terminal(jobs: Jobs) -> None:
    logs = jobs.folder / "logs"
    script = jobs.write("where.py", "import sys\nprint(sys.stdout.isatty(), sys.stderr.isatty())\n")
    flags = ("--nproc-per-node=2", "--redirects=3", "--tee=0:1", f"--log-dir={logs}")
    job = TerminalCommand(jobs, "run", *flags, script)
    assert job.wait() == 0, job.text
    assert "[rank0] True False" in job.text
    assert "[rank1]" not in job.text
    for rank, written in enumerate(("True False\n", "False False\n")):
        (path,) = logs.glob(f"*/round_1/rank_{rank}/stdout.log")
        assert path.read_text() == written


def test_a_single_worker_has_the_terminal(jobs: Jobs) -> None:
    script = jobs.write("debugged.py", DEBUGGED)
    job = TerminalCommand(jobs, "run", script, DEBUGGED="0")
    job.wait_text(r"\(Pdb\) ")
    job.type("p answer + 2\n")
    job.wait_text(r"42\r\n")
    job.type("c\n")
    assert job.wait() == 0, job.text
    assert (
        "the worker has this terminal: no status line, no file of its output, and no hang is "
        "looked for, unless --hang-after says so; --log-dir brings all of it back"
    ) in job.text
    assert "the answer is 40" in job.text
    assert "[rank0]" not in job.text


def test_a_rank_is_debugged_beside_others(jobs: Jobs) -> None:
    script = jobs.write("debugged.py", DEBUGGED)
    flags = ("--nproc-per-node=2", "--debug-rank=1")
    job = TerminalCommand(jobs, "run", *flags, script, DEBUGGED="1")
    # What people must know who stop at a prompt while other ranks wait for them.
    job.wait_text(
        r"rank 1 has this terminal; no hang is looked for meanwhile, unless --hang-after says so; "
        r"ranks that wait for it give up when the time-out of their process group is over "
        r"\(torch.distributed.init_process_group\(timeout=...\)\)"
    )
    job.wait_text(r"\(Pdb\) ")
    job.type("p answer + 2\n")
    job.wait_text(r"43\r\n")
    job.type("c\n")
    assert job.wait() == 0, job.text
    assert "[rank0] the answer is 40" in job.text


def test_who_debugs_a_rank_beside_a_master_by_hand_is_told_that_it_looks_for_hangs(
    jobs: Jobs,
) -> None:
    script = jobs.write("debugged.py", DEBUGGED)
    master = jobs.master()
    where = (f"--master={master.address}", f"--token-file={master.token_file}")
    flags = ("--nproc-per-node=2", "--debug-rank=1")
    job = TerminalCommand(jobs, "run", *where, *flags, script, DEBUGGED="1")
    job.wait_text(
        r"rank 1 has this terminal; its master still looks for hangs, .* --hang-after off"
    )
    job.wait_text(r"\(Pdb\) ")
    job.type("c\n")
    assert job.wait() == 0, job.text


def test_a_worker_killed_at_a_prompt_leaves_the_terminal_as_it_was(jobs: Jobs) -> None:
    script = jobs.write("killed.py", KILLED_AT_A_PROMPT)
    job = TerminalCommand(jobs, "run", script)
    job.wait_text(r"name\? ")
    assert job.modes == job.modes_before
    job.type("Ada\n")
    assert job.wait() == 0, job.text
    assert re.search(rf"modes {job.modes_before} Ada", job.text)
    assert job.text.endswith("\x1b[?25h"), "the cursor may still be hidden"


def test_ctrl_c_at_a_prompt_ends_the_job(jobs: Jobs) -> None:
    script = jobs.write("debugged.py", DEBUGGED)
    job = TerminalCommand(jobs, "run", script, DEBUGGED="0")
    job.wait_text(r"\(Pdb\) ")
    job.type("\x03")
    assert job.wait() == 128 + signal.SIGINT, job.text


STUBBORN = f"""{WAIT}
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
wait("first")
"""


STATUS_LINE = re.compile(r"\x1b\[\?7l.*?\x1b\[\?7h|\r?\x1b\[J")
"""What draws it, and what removes it again."""


@pytest.mark.parametrize("shape", ["one node", "local nodes", "master"])
def test_ctrl_c_is_one_line_on_a_terminal(jobs: Jobs, shape: str) -> None:
    flags = ["--nproc-per-node=2", "--grace=600"]
    if shape == "local nodes":
        flags = ["--local-nodes=2", "--nproc-per-node=1", "--grace=600"]
    elif shape == "master":
        master = jobs.master()
        flags += [f"--master={master.address}", f"--token-file={master.token_file}", "--nnodes=1"]
    job = TerminalCommand(jobs, "run", *flags, jobs.write("stubborn.py", STUBBORN))
    for rank in range(2):
        job.wait_text(rf"\[rank{rank}\] ready")
    job.type("\x03")
    job.wait_text("press Ctrl-C again")
    jobs.write("first", "")
    assert job.wait() == 128 + signal.SIGINT, job.text
    # On a slow machine the status line has come by now. It is drawn again below what is said.
    lines = STATUS_LINE.sub("", job.text.rpartition("^C")[2]).strip().split("\r\n")
    # Said when the workers have run for a moment, which may be now.
    begin = ("all workers run", "ready for a fast restart")
    told = [line for line in lines if not any(word in line for word in begin)]
    assert len(told) == 1, job.text
    assert "stopped by SIGINT" in told[0]


@pytest.mark.parametrize("way", ["breakpoint()", "import pdb; pdb.set_trace()", "input()"])
def test_a_prompt_without_a_terminal_is_explained(jobs: Jobs, way: str) -> None:
    script = jobs.write("prompt.py", f"{way}\n")
    job = jobs.run("--nproc-per-node=2", script)
    assert job.wait() == 1
    sentence = "needs a terminal: use --nproc-per-node 1, or --debug-rank RANK, on a terminal"
    assert job.count(rf"\[rank\d\] holdfast: .*{sentence}") == 1, job.text
    assert job.count(f"the job failed: rank .* NeedsTerminal: .*{sentence}") == 1, job.text
    assert job.count("round 2") == 0


def test_a_prompt_of_one_rank_after_steps_ends_the_job(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node=2", jobs.write("late_prompt.py", LATE_PROMPT))
    assert job.wait() == 1
    assert job.count("the job failed: rank 0 .* NeedsTerminal: .*late_prompt.py:") == 1, job.text
    assert job.count("round 2") == 0


def test_a_debugger_of_the_users_choice_is_left_alone(jobs: Jobs) -> None:
    script = jobs.write("prompt.py", "breakpoint()\nprint('went on')\n")
    job = jobs.run("--nproc-per-node=2", script, PYTHONBREAKPOINT="0")
    job.succeeds()
    assert len([line for line in job.out if "went on" in line]) == 2


def test_a_rank_cannot_be_debugged_without_a_terminal(jobs: Jobs) -> None:
    job = jobs.run("--debug-rank=0", jobs.write("debugged.py", DEBUGGED))
    assert job.wait() == 2
    assert "--debug-rank needs a terminal" in job.text
