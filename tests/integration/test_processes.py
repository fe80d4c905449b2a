# SPDX-License-Identifier: Apache-2.0
"""Real workers, really killed: how they start, how their end is seen, what is left of them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.process_agent import (
    TIMEOUT_S,
    Agent,
    Event,
    age_s,
    alive,
    read_progress,
    state,
)
from tests.waiting import until

FOREVER = "import signal; print('up', flush=True); signal.pause()\n"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path, spares=False) as agent:
        yield agent


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def output(started: Event) -> str:
    return str(started["path"].read_text())


def errors(started: Event) -> str:
    return Path(f"{started['path']}.err").read_text()


def wait_for_output(started: Event, lines: int = 1) -> list[str]:
    until(lambda: output(started).count("\n") >= lines, TIMEOUT_S, "the worker's output")
    return output(started).splitlines()


def plain_path(folder: Path, script: str, pythonpath: str) -> list[str]:
    """What plain Python puts into sys.path for this script, wherever this clone lies."""
    show = f"{script.removesuffix('.py')}_path.py"
    (folder / show).write_text("import json, sys; print(json.dumps(sys.path))")
    done = subprocess.run(
        [sys.executable, show],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": pythonpath},
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    return list(json.loads(done.stdout))


def test_script_sees_what_plain_python_shows_it(agent: Agent, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "sub/train.py",
        """
        import json, os, sys, helper
        main = sys.modules["__main__"]
        class Here: pass
        print(json.dumps({
            "argv": sys.argv, "path0": sys.path[0], "file": __file__, "name": __name__,
            "spec": __spec__, "cwd": os.getcwd(), "env": os.environ["COLOUR"],
            "main": main.Here is Here, "helper": helper.VALUE, "stdin": sys.stdin.read(),
            "session": os.getsid(0) == os.getpid(), "globals": sorted(globals()),
            "path": sys.path, "pythonpath": os.environ.get("PYTHONPATH", ""),
        }))
        """,
    )
    write(tmp_path, "sub/helper.py", "VALUE = 7\n")
    started, ended = agent.run(script, "--x", "a b", env={"COLOUR": "grün"})
    assert (ended["code"], ended["signal"], started["how"]) == (0, None, "cold")
    seen = json.loads(output(started))
    pythonpath = seen.pop("pythonpath")
    names = ["annotations", "builtins", "cached", "doc", "file", "loader", "name"]
    names += ["package", "spec"]
    assert seen == {
        "argv": [script, "--x", "a b"],
        "path0": str(tmp_path / "sub"),
        "file": str(tmp_path / script),
        "name": "__main__",
        "spec": None,
        "cwd": str(tmp_path),
        "env": "grün",
        "main": True,
        "helper": 7,
        "stdin": "",
        "session": True,
        "globals": [
            "Here",
            *(f"__{n}__" for n in names),
            *["helper", "json", "main", "os", "sys"],
        ],
        "path": plain_path(tmp_path, script, pythonpath),
    }


def test_module_runs_like_python_m(agent: Agent, tmp_path: Path) -> None:
    text = "import sys; print(sys.argv, sys.path[0], __spec__.name, __package__, __name__)\n"
    write(tmp_path, "pkg/__init__.py", "")
    write(tmp_path, "pkg/__main__.py", text)
    write(tmp_path, "pkg/inner.py", text)
    started, ended = agent.run("pkg", "1", mode="module")
    main = tmp_path / "pkg" / "__main__.py"
    assert output(started) == f"['{main}', '1'] {tmp_path} pkg.__main__ pkg __main__\n"
    assert ended["code"] == 0
    started, _ = agent.run("pkg.inner", mode="module")
    assert output(started).endswith("pkg.inner pkg __main__\n")
    started, ended = agent.run("pkg.nowhere", mode="module")
    assert ended["code"] == 1
    assert errors(started).endswith("No module named pkg.nowhere\n")


def test_command_is_executed_as_it_is(agent: Agent) -> None:
    started, ended = agent.run(
        "sh", "-c", 'echo "$0 $COLOUR"; exit 9', "x", mode="command", env={"COLOUR": "red"}
    )
    assert (output(started), ended["code"]) == ("x red\n", 9)
    started, ended = agent.run("no-such-command", mode="command")
    assert ended["code"] == 127
    assert errors(started) == (
        "holdfast: cannot run 'no-such-command': No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        ("raise SystemExit", 0, None),
        ("raise SystemExit(3)", 3, None),
        ("import os; os._exit(4)", 4, None),
        ("raise SystemExit('bad luck')", 1, None),
        ("1 / 0", 1, None),
        ("def broken(:", 1, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", None, signal.SIGSEGV),
        ("raise KeyboardInterrupt", None, signal.SIGINT),
    ],
)
def test_exit_codes_and_signals(
    agent: Agent, tmp_path: Path, text: str, code: int | None, number: int | None
) -> None:
    _, ended = agent.run(write(tmp_path, "train.py", text), local_rank=5)
    assert (ended["local_rank"], ended["code"], ended["signal"]) == (5, code, number)


def test_missing_script_says_so_like_python(agent: Agent, tmp_path: Path) -> None:
    started, ended = agent.run("nowhere.py")
    assert ended["code"] == 2
    where = f"'{tmp_path / 'nowhere.py'}': [Errno 2] No such file or directory"
    assert errors(started).endswith(f": can't open file {where}\n")


def test_exit_handlers_and_threads_finish(agent: Agent, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "train.py",
        """
        import atexit, threading
        atexit.register(print, "handler")
        main_ended = threading.main_thread().join
        threading.Thread(target=lambda: (main_ended(), print("thread"))).start()
        raise ValueError("main")
        """,
    )
    started, ended = agent.run(script)
    assert (output(started), ended["code"]) == ("thread\nhandler\n", 1)


def test_traceback_and_error_file_show_the_users_frames_only(agent: Agent, tmp_path: Path) -> None:
    script = write(tmp_path, "train.py", "def f():\n    raise ValueError('ouch')\nf()\n")
    error_file = tmp_path / "error.json"
    started, ended = agent.run(script, env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    path = tmp_path / script
    expected = (
        "Traceback (most recent call last):\n"
        f'  File "{path}", line 3, in <module>\n    f()\n'
        f"  File \"{path}\", line 2, in f\n    raise ValueError('ouch')\n"
        "ValueError: ouch\n"
    )
    assert errors(started) == expected
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: ouch"
    assert message["extraInfo"]["py_callstack"] == expected
    assert int(message["extraInfo"]["timestamp"]) > 1_700_000_000
    assert ended["code"] == 1


def test_error_file_of_the_program_is_kept(agent: Agent, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    text = f"open({str(error_file)!r}, 'w').write('mine')\n1 / 0\n"
    agent.run(write(tmp_path, "train.py", text), env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert error_file.read_text() == "mine"


PARENT_OF_THREE = """
    import signal, subprocess, sys
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    child = subprocess.Popen(sleeper)
    session = subprocess.Popen(sleeper, start_new_session=True)
    print(child.pid, session.pid, flush=True)
    sys.stdin.close()
    signal.sigwait([signal.SIGUSR1])
"""


def test_children_go_with_their_worker(agent: Agent, tmp_path: Path) -> None:
    started = agent.start(write(tmp_path, "train.py", PARENT_OF_THREE))
    pids = [int(pid) for pid in wait_for_output(started)[0].split()]
    assert all(map(alive, pids))
    os.kill(started["pid"], signal.SIGKILL)
    assert agent.wait("exit")["signal"] == signal.SIGKILL
    until(lambda: not any(map(alive, pids)), TIMEOUT_S, "the worker's children to be gone")
    # Reaped as well: nothing is left that has the agent as its parent but the guardian.
    until(lambda: len(children_of(agent.pid)) == 1, TIMEOUT_S, "zombies to be reaped")


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_stop_by_a_signal_is_seen_but_not_our_own(tmp_path: Path, loop: str) -> None:
    with Agent(tmp_path, spares=False, loop=loop) as agent:
        started = agent.start(write(tmp_path, "train.py", FOREVER), local_rank=3)
        wait_for_output(started)
        os.kill(started["pid"], signal.SIGSTOP)
        assert agent.wait("stopped") == {
            "kind": "stopped",
            "local_rank": 3,
            "signal": signal.SIGSTOP,
        }
        os.kill(started["pid"], signal.SIGCONT)
        assert agent.wait("continued")["local_rank"] == 3
        agent.send("signal_all", signal=signal.SIGSTOP)
        until(lambda: state(started["pid"]) == "T", TIMEOUT_S, "the worker to stop")
        agent.send("signal_all", signal=signal.SIGCONT)
        until(lambda: state(started["pid"]) == "S", TIMEOUT_S, "the worker to continue")
        agent.send("kill_now")
        agent.wait("exit")
        assert agent.so_far("stopped") == agent.so_far("continued") == []


def test_stop_asks_first_and_kills_what_does_not_listen(agent: Agent, tmp_path: Path) -> None:
    polite = write(
        tmp_path,
        "polite.py",
        """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(8))
        print("up", flush=True)
        signal.pause()
        """,
    )
    deaf = write(
        tmp_path, "deaf.py", f"import signal; signal.signal(15, signal.SIG_IGN); {FOREVER}"
    )
    wait_for_output(agent.start(polite, local_rank=0))
    frozen = agent.start(polite, local_rank=1)
    wait_for_output(frozen)
    os.kill(frozen["pid"], signal.SIGSTOP)
    agent.wait("stopped", local_rank=1)
    wait_for_output(agent.start(deaf, local_rank=2))
    agent.send("stop", grace_s=3.0)
    took_s = agent.wait("all_stopped")["took_s"]
    assert agent.wait("exit", local_rank=0)["code"] == 8
    assert agent.wait("exit", local_rank=1)["code"] == 8
    assert agent.wait("exit", local_rank=2)["signal"] == signal.SIGKILL
    assert took_s >= 3.0


def test_nothing_survives_an_agent_killed_by_sigkill(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        started = agent.start(write(tmp_path, "train.py", PARENT_OF_THREE))
        command = agent.start("sh", "-c", "sleep 1000 & echo $!; wait", mode="command")
        pids = [int(pid) for pid in wait_for_output(started)[0].split()]
        pids += [started["pid"], command["pid"], int(wait_for_output(command)[0])]
        agent.wait_for_spare("ready")
        pids += map(int, children_of(agent.pid))
        assert len(set(pids)) >= 7  # With the guardian and the zygote, and perhaps its forks.
        agent.kill()
        until(lambda: not any(map(alive, pids)), TIMEOUT_S, "everything to be gone")


# In a session of its own, with another parent, and without a trace in its environment.
HIDDEN = "env -i setsid sh -c 'sleep 1000 & echo $!; sleep 1000 & echo $!' >&1"


def start_hidden(agent: Agent, more: str = "wait; sleep 1000") -> tuple[Event, list[int]]:
    """A worker, and processes that nothing but their parent or cgroup tells to be its own."""
    started = agent.start("sh", "-c", f"{HIDDEN}; {more}", mode="command")
    return started, [int(pid) for pid in wait_for_output(started, lines=2)]


def test_a_child_with_a_clean_environment_in_its_own_session_goes_with_its_worker(
    agent: Agent,
) -> None:
    started, hidden = start_hidden(agent, "exit 0")
    assert agent.wait("exit", pid=started["pid"])["code"] == 0
    until(lambda: not any(map(alive, hidden)), TIMEOUT_S, "the hidden children to be gone")
    until(lambda: len(children_of(agent.pid)) == 1, TIMEOUT_S, "zombies to be reaped")


def test_children_of_other_code_are_left_alone(agent: Agent) -> None:
    """Those in the agent's own session, and those that it was told of."""
    agent.send("other_children")
    others = agent.wait("others")["pids"]
    _, hidden = start_hidden(agent, "exit 0")
    until(lambda: not any(map(alive, hidden)), TIMEOUT_S, "the hidden children to be gone")
    assert all(map(alive, others))
    for pid in others:
        os.kill(pid, signal.SIGKILL)


def cgroup_of(pid: int) -> str:
    """Where everything that an agent has started is, if a cgroup could be made."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next((line for line in lines if line.startswith("0::")), "")


def unified() -> Path:
    """Where version 2 of cgroups is mounted."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return next(Path(folder) for _, folder, kind, *_ in mounts if kind == "cgroup2")


@pytest.mark.parametrize("with_guardian", [False, True])
def test_nothing_hidden_survives_an_agent_killed_by_sigkill(
    tmp_path: Path, with_guardian: bool
) -> None:
    """Also if its guardian is killed in the same instant."""
    with Agent(tmp_path, spares=False) as agent:
        started, pids = start_hidden(agent)
        seen = agent.start("sh", "-c", "setsid sleep 1000 & echo $!; wait", mode="command")
        others = [started["pid"], seen["pid"], int(wait_for_output(seen)[0])]
        group = cgroup_of(started["pid"])
        has_cgroup = "/holdfast-" in group
        # A command that starts others at once, too: it was in the group before it was told to run.
        assert {cgroup_of(pid) for pid in (*others, *pids)} == {group}
        if with_guardian:
            (guardian,) = set(map(int, children_of(agent.pid))) - {*others, *pids}
            others += map(int, children_of(guardian))
            os.kill(agent.pid, signal.SIGSTOP)  # So that it cannot start another one.
            os.kill(guardian, signal.SIGKILL)
        agent.kill()
        until(lambda: not any(map(alive, others)), TIMEOUT_S, "everything to be gone")
        if has_cgroup:
            until(lambda: not any(map(alive, pids)), TIMEOUT_S, "what is hidden to be gone")
            folder = unified() / group.removeprefix("0::/")
            until(lambda: not folder.exists(), TIMEOUT_S, "the group to be gone")
    if not has_cgroup:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        pytest.skip("no cgroup can be made here: see docs/guarantees.md")


def where_none_can_be_made() -> list[str]:
    """A command that runs another one where no cgroup of version 2 is to be seen."""
    script = 'mount -t tmpfs holdfast-test "$0" && exec "$@"'
    apart = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, str(unified())]
    tried = subprocess.run(
        ["env", *apart, "true"], check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if tried.returncode != 0:
        pytest.skip(f"needs a mount namespace of its own: {tried.stderr.strip()}")
    return apart


def test_where_no_cgroup_can_be_made_the_log_says_so(tmp_path: Path) -> None:
    with Agent(tmp_path, spares=False) as agent:
        started = agent.start("sleep", "1000", mode="command")
        has_cgroup = "/holdfast-" in cgroup_of(started["pid"])
        assert bool(agent.so_far("detail")) != has_cgroup
    with Agent(
        tmp_path, spares=False, prefix=where_none_can_be_made() if has_cgroup else ()
    ) as agent:
        (said,) = agent.so_far("detail")
        assert said["text"].startswith("No cgroup can be made here: if this agent is killed by")
        assert agent.so_far("say") == []


def test_guardian_is_replaced_when_it_dies(tmp_path: Path) -> None:
    with Agent(tmp_path, spares=False) as agent:
        started = agent.start("sh", "-c", "setsid sleep 1000 & echo $!; wait", mode="command")
        pids = [started["pid"], int(wait_for_output(started)[0])]
        (guardian,) = set(map(int, children_of(agent.pid))) - {started["pid"]}
        until(lambda: age_s(guardian) > 1.5, TIMEOUT_S, "the guardian to be old enough")
        os.kill(guardian, signal.SIGKILL)
        known = {str(started["pid"]), str(guardian)}
        until(lambda: set(children_of(agent.pid)) - known, TIMEOUT_S, "a new guardian")
        agent.kill()
        until(lambda: not any(map(alive, pids)), TIMEOUT_S, "everything to be gone")


def test_optimizer_steps_of_an_unmodified_script_are_counted(agent: Agent, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "train.py",
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        """,
    )
    cell = str(tmp_path / "progress")
    _, ended = agent.run(script, progress=cell)
    progress = read_progress(cell)
    assert (ended["code"], progress.steps, progress.reported_step) == (0, 5, -1)
    assert 0 < progress.main_at < progress.first_step_at <= progress.last_step_at
    assert Path(cell).stat().st_mode & 0o777 == 0o600
