# SPDX-License-Identifier: Apache-2.0
"""Warm spares: what a worker made from one sees, and when one is not used."""

import json
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.process_agent import TIMEOUT_S, Agent, Event, alive, read_progress
from tests.waiting import until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as agent:
        yield agent


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def output(started: Event) -> str:
    return str(started["path"].read_text())


def finish(agent: Agent, *argv: str, how: str, **options: object) -> str:
    """Run a worker to its end; its output."""
    started, ended = agent.run(*argv, **options)
    errors = Path(f"{started['path']}.err").read_text()
    assert (started["how"], ended["code"], errors) == (how, 0, "")
    return output(started)


SEES = """
    import sys
    before = "decimal" in sys.modules
    import decimal, json, os
    print(json.dumps({
        "before": before, "argv": sys.argv, "path": sys.path, "file": __file__,
        "cwd": os.getcwd(), "env": dict(os.environ), "spec": __spec__, "name": __name__,
        "main": sys.modules["__main__"].before is before, "stdin": sys.stdin.read(),
        "session": os.getsid(0) == os.getpid(), "globals": sorted(globals()),
        "fds": sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0].rstrip(".er0123456789")
                      for fd in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{fd}")),
        "signals": open("/proc/self/status").read().split("SigBlk:")[1].split("CapInh")[0],
    }))
"""


def test_forked_worker_sees_what_a_cold_one_sees(agent: Agent, tmp_path: Path) -> None:
    script = write(tmp_path, "sub/train.py", SEES)
    env = {"RANK": "0", "COLOUR": "grün"}
    cold = json.loads(finish(agent, script, "--x", "a b", how="cold", env=env))
    agent.wait_for_spare("ready")
    warm = json.loads(finish(agent, script, "--x", "a b", how="zygote", env=env))
    assert (cold.pop("before"), warm.pop("before")) == (False, True)
    assert warm == cold
    rank = json.loads(finish(agent, script, how="zygote", env={"RANK": "3", "COLOUR": "grün"}))
    assert (rank["env"]["RANK"], rank["argv"]) == ("3", [script])


def test_module_runs_from_a_spare(agent: Agent, tmp_path: Path) -> None:
    write(tmp_path, "pkg/__init__.py", "")
    write(
        tmp_path, "pkg/run.py", "import sys, decimal; print(sys.argv, sys.path[0], __spec__.name)"
    )
    cold = finish(agent, "pkg.run", "1", how="cold", mode="module")
    agent.wait_for_spare("ready")
    assert finish(agent, "pkg.run", "1", how="zygote", mode="module") == cold


def test_multiprocessing_spawn_and_exit_handlers_work_in_a_fork(
    agent: Agent, tmp_path: Path
) -> None:
    script = write(
        tmp_path,
        "train.py",
        """
        import atexit, multiprocessing, decimal

        class Task:
            def __init__(self, value): self.value = value

        def double(task): return Task(task.value * 2)

        if __name__ == "__main__":
            atexit.register(print, "handler")
            for method in ("spawn", "fork", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.apply(double, (Task(4),)).value)
        """,
    )
    expected = "spawn 8\nfork 8\nforkserver 8\nhandler\n"
    assert finish(agent, script, how="cold") == expected
    agent.wait_for_spare("ready")
    assert finish(agent, script, how="zygote") == expected


def test_edited_user_code_is_what_runs(agent: Agent, tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "import decimal, model; print(model.SIZE)")
    write(tmp_path, "model.py", "import fractions\nSIZE = 1\n")
    assert finish(agent, script, how="cold") == "1\n"
    agent.wait_for_spare("ready")
    write(tmp_path, "model.py", "import fractions\nSIZE = 200\n")
    assert finish(agent, script, how="zygote") == "200\n"


def test_changed_library_outside_the_script_folder_is_noticed(
    tmp_path: Path,
) -> None:
    work, library = tmp_path / "work", tmp_path / "library"
    work.mkdir()
    write(library, "model.py", "SIZE = 1\n")
    script = write(work, "train.py", "import model; print(model.SIZE)")
    env = {"PYTHONPATH": str(library)}
    with Agent(work) as agent:
        assert finish(agent, script, how="cold", env=env) == "1\n"
        agent.wait_for_spare("ready")
        assert finish(agent, script, how="zygote", env=env) == "1\n"
        write(library, "model.py", "SIZE = 200\n")
        assert finish(agent, script, how="cold", env=env) == "200\n"
        assert "model.py has changed" in agent.wait("say")["text"]


def test_changed_environment_is_not_served_by_an_old_spare(agent: Agent, tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "import decimal")
    finish(agent, script, how="cold")
    agent.wait_for_spare("ready")
    finish(agent, script, how="cold", env={"OMP_NUM_THREADS": "2"})
    agent.wait_for_spare("ready")
    finish(agent, script, how="zygote", env={"OMP_NUM_THREADS": "2"})


def site_package(folder: Path, name: str, text: str) -> dict[str, str]:
    """An installed library, and the environment in which it is found."""
    write(folder, f"site-packages/{name}.py", text)
    return {"PYTHONPATH": str(folder / "site-packages")}


THREADED = """
    import threading
    started = threading.Thread(target=threading.Event().wait, daemon=True)
    started.start()
"""


def test_module_with_a_thread_leads_to_one_shot_spares(agent: Agent, tmp_path: Path) -> None:
    env = site_package(tmp_path, "threaded", THREADED)
    text = "import sys; print('threaded' in sys.modules); import threaded"
    text += "; print(threaded.started.is_alive())"
    script = write(tmp_path, "train.py", text)
    assert finish(agent, script, how="cold", env=env) == "False\nTrue\n"
    agent.wait_for_spare("one-shot")
    assert finish(agent, script, how="one-shot", env=env) == "True\nTrue\n"
    agent.wait_for_spare("one-shot")
    assert finish(agent, script, how="one-shot", env=env) == "True\nTrue\n"
    (said,) = agent.so_far("say")
    assert said["text"] == (
        "The module threaded cannot be preloaded for forking, because it starts a thread when it"
        " is imported; one-shot spares are used instead."
    )


def test_module_that_is_only_looked_up_is_not_preloaded(agent: Agent, tmp_path: Path) -> None:
    """As torch looks up pandas, which starts a thread once it is imported: forks must go on."""
    env = site_package(tmp_path, "threaded", THREADED)
    text = "import decimal, importlib.util; print(importlib.util.find_spec('threaded') is None)"
    script = write(tmp_path, "train.py", text)
    assert finish(agent, script, how="cold", env=env) == "False\n"
    agent.wait_for_spare("ready")
    assert finish(agent, script, how="zygote", env=env) == "False\n"
    assert agent.so_far("say") == []


def test_module_that_reads_its_rank_is_left_to_the_workers(agent: Agent, tmp_path: Path) -> None:
    env = site_package(tmp_path, "ranked", "import os\nRANK = os.environ.get('RANK', 'none')\n")
    script = write(
        tmp_path,
        "train.py",
        "import sys; print('decimal' in sys.modules); import decimal, ranked; print(ranked.RANK)",
    )
    finish(agent, script, how="cold", env=env | {"RANK": "0"})
    agent.wait_for_spare("ready")
    assert finish(agent, script, how="zygote", env=env | {"RANK": "1"}) == "True\n1\n"
    (said,) = agent.so_far("say")
    assert "The module ranked cannot be preloaded" in said["text"]
    assert "it reads RANK when it is imported" in said["text"]


def test_module_that_kills_its_process_turns_spares_off(agent: Agent, tmp_path: Path) -> None:
    text = "import os\nif 'RANK' not in os.environ: os.abort()\n"
    env = site_package(tmp_path, "fatal", text)
    finish(agent, write(tmp_path, "train.py", "import fatal"), how="cold", env=env | {"RANK": "0"})
    agent.wait_for_spare("off: spares die while they import the workers' modules")
    finish(agent, "train.py", how="cold", env=env | {"RANK": "0"})


def test_dead_and_silent_zygotes_are_replaced(agent: Agent, tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "import decimal")
    finish(agent, script, how="cold")
    agent.wait("warm")
    for pid in spares_of(agent):
        os.kill(pid, signal.SIGKILL)
    assert "ended by signal 9" in agent.wait("say")["text"]
    agent.wait("warm")
    silent = spares_of(agent)
    assert len(silent) == 2
    for pid in silent:
        os.kill(pid, signal.SIGSTOP)
    finish(agent, script, how="cold")
    assert "did not answer within 2 s" in agent.wait("say")["text"]
    finish(agent, script, how="cold")
    until(lambda: not any(map(alive, silent)), TIMEOUT_S, "the silent spares to be gone")
    agent.wait_for_spare("ready")
    finish(agent, script, how="zygote")


def spares_of(agent: Agent) -> list[int]:
    """The zygote first, then the forks that stand by."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    shown = [(int(c), Path(f"/proc/{c}/cmdline").read_bytes()) for c in children]
    return sorted(pid for pid, words in shown if b"\0spare\0" in words)


# The processes that import it are through at once, but this one of them when the test wants.
SLOW = """
    import os, threading
    from pathlib import Path
    folder = Path(__file__).parent
    number = len(list(folder.glob("import-*"))) + 1
    (folder / f"import-{os.getpid()}").touch()
    while number == SLOW_ONE and not (folder / "go").exists():
        threading.Event().wait(0.01)
"""


def start_while_a_spare_imports(agent: Agent, tmp_path: Path, text: str, number: int) -> Path:
    """The spare is the one of this number to import it. Returns the folder of that module."""
    env = site_package(tmp_path, "slow", text.replace("SLOW_ONE", str(number)))
    folder = tmp_path / "site-packages"
    script = write(tmp_path, "train.py", "import slow")
    finish(agent, script, how="cold", env=env)
    until(lambda: len(list(folder.glob("import-*"))) == number, TIMEOUT_S, "the spare's import")
    order = {"local_rank": 0, "argv": [script], "mode": "script", "progress": ""}
    agent.send("start", env=env, out=str(tmp_path / "second"), **order)
    assert agent.so_far("started") == agent.so_far("started") == []
    return folder


def start_while_the_zygote_imports(agent: Agent, tmp_path: Path) -> Path:
    return start_while_a_spare_imports(agent, tmp_path, SLOW, 2)


def test_a_one_shot_spare_that_still_imports_is_waited_for_by_one_worker(
    agent: Agent, tmp_path: Path
) -> None:
    # After the worker and the zygote, which is of no use with a thread.
    text = textwrap.dedent(SLOW) + textwrap.dedent(THREADED)
    folder = start_while_a_spare_imports(agent, tmp_path, text, 3)
    env = {"PYTHONPATH": str(folder)}
    assert agent.start("train.py", local_rank=1, env=env)["how"] == "cold"
    (folder / "go").touch()
    assert agent.wait("started")["how"] == "one-shot"
    for local_rank in (0, 1):
        assert agent.wait("exit", local_rank=local_rank)["code"] == 0


# The third spare that imports it is through when the test wants.
SLOW_SPARE = """
    import os
    from pathlib import Path
    folder = Path(__file__).parent
    if "\\0spare\\0" in Path("/proc/self/cmdline").read_text():
        (folder / f"spare-{os.getpid()}").touch()
        while len(list(folder.glob("spare-*"))) == 3 and not (folder / "go").exists():
            threading.Event().wait(0.01)
"""


def test_a_node_is_warm_when_there_is_a_one_shot_spare_for_each_worker(
    agent: Agent, tmp_path: Path
) -> None:
    # The zygote, which is of no use with a thread, and one for each of the two workers.
    env = site_package(tmp_path, "slow", THREADED + SLOW_SPARE)
    folder = tmp_path / "site-packages"
    script = write(tmp_path, "train.py", "import signal, slow; signal.pause()")
    for local_rank in (0, 1):
        agent.start(script, local_rank=local_rank, env=env)
    until(lambda: len(list(folder.glob("spare-*"))) == 3, TIMEOUT_S, "the last spare's import")
    agent.send("spare_state")
    assert agent.wait("spare")["state"] == "warming"
    (folder / "go").touch()
    agent.wait_for_spare("one-shot")


def test_a_zygote_that_still_imports_is_waited_for(agent: Agent, tmp_path: Path) -> None:
    """A worker that began with the same imports then would be ready later than the zygote."""
    folder = start_while_the_zygote_imports(agent, tmp_path)
    (folder / "go").touch()
    assert agent.wait("started")["how"] == "zygote"
    assert agent.wait("exit")["code"] == 0
    assert len(list(folder.glob("import-*"))) == 2


def test_a_worker_that_waits_for_a_zygote_can_be_killed(agent: Agent, tmp_path: Path) -> None:
    start_while_the_zygote_imports(agent, tmp_path)
    agent.send("kill_now")
    assert agent.wait("exit")["signal"] == signal.SIGKILL


def test_a_worker_that_waits_for_a_zygote_does_not_wait_for_a_dead_one(
    agent: Agent, tmp_path: Path
) -> None:
    start_while_the_zygote_imports(agent, tmp_path)
    for pid in spares_of(agent):
        os.kill(pid, signal.SIGKILL)
    assert agent.wait("started")["how"] == "cold"
    assert agent.wait("exit")["code"] == 0


def test_forked_workers_die_with_a_killed_agent(agent: Agent, tmp_path: Path) -> None:
    script = write(
        tmp_path, "train.py", "import decimal, signal, sys\nif sys.argv[1:]: signal.pause()\n"
    )
    finish(agent, script, how="cold")
    agent.wait_for_spare("ready")
    started = agent.start(script, "stay")
    assert started["how"] == "zygote"
    shown = Path(f"/proc/{started['pid']}/cmdline")
    until(lambda: b"\0-u\0train.py\0stay\0" in shown.read_bytes(), TIMEOUT_S, "its own name")
    pids = [started["pid"], *spares_of(agent)]
    assert len(pids) >= 2
    assert all(map(alive, pids))
    agent.kill()
    until(lambda: not any(map(alive, pids)), TIMEOUT_S, "worker and zygote to be gone")


def test_exit_of_a_forked_worker_is_reported(agent: Agent, tmp_path: Path) -> None:
    script = write(
        tmp_path, "train.py", "import decimal, os, sys\nif sys.argv[1:]: eval(sys.argv[1])\n"
    )
    finish(agent, script, how="cold")
    agent.wait_for_spare("ready")
    endings = {
        "os.kill(os.getpid(), 11)": (None, signal.SIGSEGV),
        "sys.exit(7)": (7, None),
        "1 / 0": (1, None),
    }
    for code, expected in endings.items():
        started, ended = agent.run(script, code)
        assert (started["how"], ended["code"], ended["signal"]) == ("zygote", *expected)
    errors = Path(f"{started['path']}.err").read_text()
    assert "holdfast" not in errors
    assert errors.endswith("ZeroDivisionError: division by zero\n")


def test_workers_of_a_node_are_started_at_once(agent: Agent, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "train.py",
        "import os, signal, decimal; print(os.getenv('RANK')); signal.pause()",
    )
    for round_number in range(3):
        for rank in range(3):
            name = str(tmp_path / f"rank-{round_number}-{rank}")
            order = {"local_rank": rank, "argv": [script], "mode": "script", "progress": ""}
            agent.send("start", env={"RANK": str(rank)}, out=name, **order)
        started = [agent.wait("started") for _ in range(3)]
        assert {one["how"] for one in started} == {"zygote" if round_number else "cold"}
        for one in started:
            path = Path(one["out"])
            # A line may come in two writes.
            until(lambda path=path: path.read_text().endswith("\n"), TIMEOUT_S, "a line of output")
            assert path.read_text() == f"{path.name[-1]}\n"
        agent.wait_for_spare("ready")
        agent.send("kill_now")
        assert {agent.wait("exit")["local_rank"] for _ in range(3)} == {0, 1, 2}


TRAIN = """
    import sys
    before = "torch" in sys.modules
    import numpy, torch
    numbers = numpy.random.rand(2).tolist()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    print(before, *numbers)
"""


def test_torch_worker_is_forked_in_milliseconds_and_counts_steps(
    agent: Agent, tmp_path: Path
) -> None:
    script, cell = write(tmp_path, "train.py", TRAIN), str(tmp_path / "progress")
    streams = {finish(agent, script, how="cold", progress=cell)}
    agent.wait_for_spare("ready")
    for _ in range(3):
        started, ended = agent.run(script, progress=cell)
        assert (started["how"], ended["code"]) == ("zygote", 0)
        progress = read_progress(cell)
        assert progress.steps == 5
        to_main_s = progress.main_at - started["began"]
        print(
            f"start to user code {to_main_s * 1e3:.1f} ms,"
            f" to the first step {(progress.first_step_at - started['began']) * 1e3:.1f} ms"
        )
        assert output(started).startswith("True ")
        streams.add(output(started))
    assert len(streams) == 4  # Forks do not share one stream of random numbers.
