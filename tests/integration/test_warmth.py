# SPDX-License-Identifier: Apache-2.0
"""Being ready before one is needed: newcomers that warm up first, stores that serve one round."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.client import AgentClient
from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs, MasterCommand, wait_gone
from tests.waiting import until

TALK = str(SCRIPTS / "talk.py")
TRAIN = str(SCRIPTS / "train.py")
TWO = ("--nnodes", "2")
ELASTIC = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1")

# What the workers import. On node "b" its import takes as long as the test wants.
SLOW_MODULE = """
import os, threading
from pathlib import Path
folder, node = Path(os.environ["STEPS_FOLDER"]), os.environ["STEPS_NODE"]
(folder / f"import-{node}-{os.getpid()}").touch()
while node == "b" and not (folder / "imported").exists():
    threading.Event().wait(0.01)
"""


LATE_MODULE = """
import os
from pathlib import Path
node = os.environ.get("STEPS_NODE", "")
(Path(os.environ["STEPS_FOLDER"]) / f"{__name__}-{node}-{os.getpid()}").touch()
"""
# A thread of the worker imports each of them when the test wants.
LATE_IMPORTS = """
import importlib, os, threading
from pathlib import Path

def import_late():
    for name in ("late", "later"):
        while not (Path(os.environ["STEPS_FOLDER"]) / name).exists():
            threading.Event().wait(0.01)
        importlib.import_module(f"{name}_module")

threading.Thread(target=import_late, daemon=True).start()
"""


def write_late_modules(folder: Path) -> None:
    for name in ("late", "later"):
        (folder / f"{name}_module.py").write_text(LATE_MODULE)


def wait_imported(jobs: Jobs, module: str, *, count: int = 1, node: str = "") -> None:
    """Wait until `count` processes (of a node) have imported it."""

    def are_enough() -> bool:
        return len(list(jobs.folder.glob(f"{module}-{node}*"))) >= count

    until(are_enough, LIMIT_S, f"{count} imports of {module}")


def steps_with(module: str) -> str:
    """scripts/steps.py, with one more import in front."""
    return (
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport {module}\n"
        + (SCRIPTS / "steps.py").read_text()
    )


def knows_modules(master: MasterCommand) -> bool:
    client = AgentClient(f"tcp:{master.address}", read_token(master.token_file), scope=0)
    answer = client.call(m.KvCheck(0, ("holdfast/modules",)), LIMIT_S)
    return isinstance(answer, m.Number) and answer.number == 1


def store_servers(jobs: Jobs) -> set[int]:
    found = set()
    for process in jobs.living():
        try:
            if "holdfast.torch.elastic.store_server" in process.cmdline():
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_newcomer_imports_before_the_world_stops_for_it(jobs: Jobs, tmp_path: Path) -> None:
    """However long that takes: the others train on until it is done, and it is not done again."""
    # Outside the working directory: code there is the user's own, and never preloaded.
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    script = jobs.write("own/steps.py", steps_with("slow_module"))
    path = f"{jobs.environment()['PYTHONPATH']}:{tmp_path}"
    master = jobs.master()
    first = jobs.node(master, *ELASTIC, script, name="a", PYTHONPATH=path)
    jobs.wait_world(1)
    until(lambda: knows_modules(master), LIMIT_S, "what the workers import is known to the job")
    late = jobs.node(master, *ELASTIC, script, name="b", PYTHONPATH=path)
    until(lambda: list(jobs.folder.glob("import-b-*")), LIMIT_S, "the newcomer's imports")
    made = len(jobs.steps())
    jobs.wait_for("step", count=made + 50)
    assert {event.world for event in jobs.events()} == {1}
    (jobs.folder / "imported").touch()
    jobs.wait_world(2)
    assert len(list(jobs.folder.glob("import-b-*"))) == 1
    jobs.finish()
    first.succeeds()
    late.succeeds()


def test_a_spare_node_that_was_there_from_the_start_is_warm(jobs: Jobs) -> None:
    """It gets to know what the others import as soon as they do, and starts as fast as they."""
    job = jobs.run("--local-nodes", "2", "--spare-nodes", "1", str(SCRIPTS / "steps.py"))
    first = jobs.wait_world(2)
    job.wait_line("ready for a fast restart", after=1)
    job.wait_line("ready for a fast start")

    def all_are_shown_as_warm() -> bool:
        state = jobs.start("status", "--json")
        state.succeeds()
        nodes = json.loads(state.out[0])["nodes"]
        return [node["warm"] for node in nodes] == [True] * 3

    until(all_are_shown_as_warm, LIMIT_S, "three warm nodes in the status")
    os.kill(first[1].agent, signal.SIGKILL)
    second = jobs.wait_world(2, after=first)
    assert {event.agent for event in second} > {first[0].agent}
    assert "(zygote start)" in job.wait_line("round 2: all workers run")
    jobs.finish()
    job.succeeds()


def test_what_is_imported_late_reaches_the_spare_node_too(jobs: Jobs, tmp_path: Path) -> None:
    write_late_modules(tmp_path)
    script = jobs.write("own/steps.py", LATE_IMPORTS + steps_with("json"))
    path = f"{jobs.environment()['PYTHONPATH']}:{tmp_path}"
    options = ("--local-nodes", "1", "--spare-nodes", "1", script)
    job = jobs.run(*options, PYTHONPATH=path)
    job.wait_line("ready for a fast start")
    (jobs.folder / "late").touch()
    wait_imported(jobs, "late_module", count=3)
    jobs.finish()
    job.succeeds()


def test_what_is_imported_after_the_loss_of_node_0_reaches_the_spare_node(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The node that publishes from then on has not seen what the lost one had published."""
    write_late_modules(tmp_path)
    script = jobs.write("own/steps.py", LATE_IMPORTS + steps_with("json"))
    path = f"{jobs.environment()['PYTHONPATH']}:{tmp_path}"
    master = jobs.master()
    ranks = {"a": "0", "b": "1", "c": "2", "d": "3"}

    def join(name: str) -> Command:
        options = (*TWO, "--node-rank", ranks[name], script)
        return jobs.node(master, *options, name=name, PYTHONPATH=path)

    nodes = {name: join(name) for name in "ab"}
    first = jobs.wait_world(2)
    nodes |= {name: join(name) for name in "cd"}
    # The lost node shares two lists, so that counting them from 1 again would show.
    for name in "cd":
        nodes[name].wait_line("ready for a fast start")
    (jobs.folder / "late").touch()
    for name in "abcd":
        wait_imported(jobs, "late_module", node=name)
    jobs.kill_all(node="a")
    second = jobs.wait_world(2, after=first)
    assert [event.node for event in second] == ["b", "c"]
    nodes["b"].wait_line("ready for a fast restart", after=1)
    (jobs.folder / "later").touch()
    wait_imported(jobs, "later_module", node="d")
    jobs.finish()
    for name in "bcd":
        nodes[name].succeeds()


def test_what_a_changed_script_imports_reaches_the_spare_node(jobs: Jobs, tmp_path: Path) -> None:
    """The job goes on from a journal in which there is a list already."""
    write_late_modules(tmp_path)
    path = f"{jobs.environment()['PYTHONPATH']}:{tmp_path}"
    state = ("--state", str(jobs.folder / "state"))
    options = (*state, "--local-nodes", "1", "--spare-nodes", "1")
    job = jobs.run(*options, jobs.write("own/steps.py", steps_with("json")), PYTHONPATH=path)
    job.wait_line("ready for a fast start")
    job.send(signal.SIGTERM)
    assert job.wait() == 143
    script = jobs.write("own/steps.py", steps_with("late_module"))
    job = jobs.run(*options, script, PYTHONPATH=path)
    wait_imported(jobs, "late_module", count=3)
    jobs.finish()
    job.succeeds()


def test_every_round_has_a_store_of_its_own_that_is_there_first(jobs: Jobs) -> None:
    """Keys of a dead round cannot be read, and no worker has to wait for rank 0 to listen."""
    job = jobs.run("--nproc-per-node", "2", TRAIN)
    seen: set[int] = set()
    world = jobs.wait_world(2)
    for ready in range(2):
        job.wait_line("ready for a fast restart", after=ready)
        fresh = until(lambda: store_servers(jobs) - seen, LIMIT_S, "a store server")  # noqa: B023
        os.kill(world[1].pid, signal.SIGKILL)
        world = jobs.wait_world(2, after=world)
        assert fresh <= store_servers(jobs), "the store of the present round was ended"
        seen |= fresh
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def test_a_dead_store_server_is_not_used(jobs: Jobs) -> None:
    """Killed before its round began: rank 0 serves instead, and nobody waits for the dead one."""
    job = jobs.run("--nproc-per-node", "2", TRAIN)
    world = jobs.wait_world(2)
    job.wait_line("ready for a fast restart")
    servers = until(lambda: store_servers(jobs), LIMIT_S, "a store server")
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    wait_gone(servers)
    os.kill(world[1].pid, signal.SIGKILL)
    jobs.wait_world(2, after=world)
    jobs.finish()
    job.succeeds()


@pytest.fixture
def unread(jobs: Jobs) -> Iterator[subprocess.Popen[bytes]]:
    """A job that prints 20 MB to a console that nobody reads, with little patience for silence."""
    master = jobs.master("--beat", "0.5", "--silence", "5", "--lease", "10")
    where = ("--master", master.address, "--token-file", str(master.token_file))
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "run", *where, TALK],
        env=jobs.environment(LINES_TO_PRINT="200000"),
        cwd=jobs.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield process
        process.kill()


def test_a_console_that_nobody_reads_does_not_cost_the_node(
    jobs: Jobs, unread: subprocess.Popen[bytes]
) -> None:
    master = jobs.commands[0]
    master.wait_line("all workers run")
    with pytest.raises(AssertionError, match="no line"):
        master.wait_line("is lost", timeout_s=8.0)
    assert unread.stdout is not None
    shown = unread.stdout.read().splitlines()
    assert unread.wait(LIMIT_S) == 0
    assert len(shown) == 200_001
    assert master.count("all workers run") == 1
