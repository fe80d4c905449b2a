# SPDX-License-Identifier: Apache-2.0
"""Whole jobs as real processes, for tests that kill parts of them.

`Jobs` (the fixture `jobs`) is one test's playground: a folder, the commands that were started in
it, and the log in which the workers of tests/integration/scripts write down what they do. Tests
address failures by what the log says, never by time. At its end everything that was ever started
from it, and still lives, is killed, whatever process group it has moved to.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
LIMIT_S = 120.0
"""For everything that must happen: far above what it takes, because the machine may be busy."""

MARK = "HOLDFAST_TEST_JOBS"
ANNOUNCEMENT = "holdfast master listening on "


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the log of a worker (see scripts/steplog.py, which writes it)."""

    t: float
    """Monotonic time: comparable between all processes of the machine."""
    what: str
    step: int
    rank: int
    local_rank: int
    world: int
    round: int
    restarts: int
    pid: int
    agent: int
    """The process id of the agent, which is the parent of its workers."""
    node: str
    """The name that `Jobs.node` or the test gave to the node; empty for others."""
    state: str = ""
    """A digest of the whole state of the rank, from scripts that write it down."""


class Command:
    """A `holdfast` command that was started, in a process group of its own."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.argv = argv
        self.pid = self._process.pid
        self.out: list[str] = []
        self.err: list[str] = []
        self._changed = threading.Condition()
        self._open_pipes = 2
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, lines), daemon=True)
            for pipe, lines in ((self._process.stdout, self.out), (self._process.stderr, self.err))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[bytes], lines: list[str]) -> None:
        with pipe:
            for line in pipe:
                with self._changed:
                    lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._open_pipes -= 1
            self._changed.notify_all()

    @property
    def text(self) -> str:
        """Everything it has written so far: standard output, then standard error."""
        with self._changed:
            return "\n".join([*self.out, *self.err])

    def is_running(self) -> bool:
        return self._process.poll() is None

    def count(self, pattern: str) -> int:
        """How many lines match so far; give it to `wait_line` to wait for a new one."""
        with self._changed:
            return sum(1 for line in [*self.out, *self.err] if re.search(pattern, line))

    def wait_line(self, pattern: str, *, after: int = 0, timeout_s: float = LIMIT_S) -> str:
        """The first line of either stream that matches, or the first after so many matches."""

        def found() -> str | None:
            matches = [line for line in [*self.out, *self.err] if re.search(pattern, line)]
            return matches[after] if len(matches) > after else None

        with self._changed:
            self._changed.wait_for(lambda: found() is not None or not self._open_pipes, timeout_s)
            line = found()
        assert line is not None, f"no line with {pattern!r} in {timeout_s:g} s:\n{self.text}"
        return line

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """The exit code, when it has ended and all its output is here; negative: by a signal."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {timeout_s:g} s:\n{self.text}") from None
        for reader in self._readers:
            # Something that outlives the command may hold its output open; that is for the test
            # to find out by `Jobs.living`, not here.
            reader.join(5.0)
        return code

    def succeeds(self, timeout_s: float = LIMIT_S) -> None:
        """Wait for the exit code 0."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.text}"

    def send(self, number: signal.Signals) -> None:
        """A signal to the process itself alone."""
        self._process.send_signal(number)

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """As the terminal does on Ctrl-C: to the whole process group."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to the process itself alone; returns when it is gone."""
        self._process.kill()
        self._process.wait(LIMIT_S)


class MasterCommand(Command):
    """`holdfast master`, serving. Start another on the same state with `Jobs.master`."""

    address: str
    token_file: Path


class Jobs:
    """What one test starts, and where."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Also the working directory of all commands."""
        self.temporary = folder / "tmp"
        """TMPDIR of all commands: what they leave there is left behind."""
        self.log = folder / "steps.log"
        self.commands: list[Command] = []
        self._read_to = 0
        self._events: list[Event] = []
        self.temporary.mkdir()
        self.log.touch()

    # ---- starting -------------------------------------------------------------------------------

    def environment(self, **more: str) -> dict[str, str]:
        """What every command gets: this tree's code, the log, and the mark to find it again."""
        # Ray's tests run in the same process, and Ray sets a debugger for all of its children.
        ours = (name for name in os.environ if not name.startswith(("PET_", "PYTHONBREAKPOINT")))
        env = {name: os.environ[name] for name in ours}
        return {
            **env,
            "PYTHONPATH": str(ROOT / "src"),
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "STEPS_FOLDER": str(self.folder),
            MARK: str(self.folder),
            **more,
        }

    def start(self, *words: str, prefix: Sequence[str] = (), **env: str) -> Command:
        """Start `holdfast WORDS...`, by the command `prefix` if there is one; keywords are more
        environment."""
        argv = [*prefix, sys.executable, "-m", "holdfast.cli", *words]
        command = Command(argv, self.environment(**env), self.folder)
        self.commands.append(command)
        return command

    def run(self, *words: str, prefix: Sequence[str] = (), **env: str) -> Command:
        """Start `holdfast run WORDS...`."""
        return self.start("run", *words, prefix=prefix, **env)

    def master(
        self,
        *words: str,
        listen: str = "127.0.0.1:0",
        state: Path | None = None,
        job: str = "test",
        **env: str,
    ) -> MasterCommand:
        """Start `holdfast master` and wait until it serves.

        To restart one that was killed give `listen` its address; the state directory is the same.
        """
        state = state or self.folder / "state"
        options = ["--job", job, "--listen", listen, "--state", str(state), *words]
        argv = [sys.executable, "-m", "holdfast.cli", "master", *options]
        master = MasterCommand(argv, self.environment(**env), self.folder)
        self.commands.append(master)
        line = master.wait_line(ANNOUNCEMENT)
        master.address = line.removeprefix(ANNOUNCEMENT).strip()
        master.token_file = state / "token"
        return master

    def node(
        self,
        master: MasterCommand,
        *words: str,
        name: str = "",
        prefix: Sequence[str] = (),
        **env: str,
    ) -> Command:
        """Start `holdfast run --master ... WORDS...`: one node of a job with several."""
        where = ("--master", master.address, "--token-file", str(master.token_file))
        return self.run(*where, *words, prefix=prefix, STEPS_NODE=name, **env)

    def write(self, name: str, text: str) -> str:
        """Make a file in the folder; returns its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    # ---- the workers' log -----------------------------------------------------------------------

    def events(self, what: str = "") -> list[Event]:
        """What the workers have written down so far, all of it or one kind."""
        # Whoever waits for an event asks often: what was read once is not read again.
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            text = log.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._read_to += len(complete)
        self._events += [Event(**json.loads(line)) for line in complete.splitlines()]
        return [event for event in self._events if not what or event.what == what]

    def steps(self, *, round: int = 0) -> list[Event]:
        """All finished steps, or those of one round."""
        return [event for event in self.events("step") if not round or event.round == round]

    def wait_for(
        self,
        what: str,
        matches: Callable[[Event], bool] = lambda event: True,
        *,
        count: int = 1,
        timeout_s: float = LIMIT_S,
    ) -> list[Event]:
        """Wait until so many events of this kind match; returns all that do."""

        def enough() -> list[Event]:
            found = [event for event in self.events(what) if matches(event)]
            return found if len(found) >= count else []

        return self._until(enough, timeout_s, f"{count} times {what!r}")

    def wait_world(self, world: int, *, after: Iterable[Event] = (), steps: int = 2) -> list[Event]:
        """Wait until a world of this size has made so many steps, in a round later than `after`.

        Returns the newest event of each rank, by rank.
        """
        past = max((event.round for event in after), default=0)

        def newest() -> list[Event]:
            by_round: dict[int, list[Event]] = {}
            for event in self.events("step"):
                if event.round > past and event.world == world:
                    by_round.setdefault(event.round, []).append(event)
            for of_round in by_round.values():
                last = {event.rank: event for event in of_round}
                made = [sum(1 for e in of_round if e.rank == rank) for rank in last]
                if len(last) == world and min(made) >= steps:
                    return [last[rank] for rank in sorted(last)]
            return []

        return self._until(newest, LIMIT_S, f"steps of a world of {world} after round {past}")

    def _until(self, look: Callable[[], list[Event]], timeout_s: float, what: str) -> list[Event]:
        """Like `until`, but not longer than there is anybody left who could make it happen."""

        def found() -> list[Event] | bool:
            over = not any(command.is_running() for command in self.commands)
            return look() or over

        try:
            events = until(found, timeout_s, what=what)
            assert isinstance(events, list), f"all commands have ended without {what}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None
        return events

    def go(self) -> None:
        """Let the scripts go on that wait after the step $HOLD."""
        (self.folder / "go").touch()

    def go_when_warm(self, job: Command, nodes: int = 1) -> None:
        """Let them go on when each node has a warm spare: a restart costs next to nothing then,
        where a cold one imports torch anew in every worker."""
        job.wait_line("ready for a fast restart", after=nodes - 1)
        self.go()

    def finish(self) -> None:
        """Let the scripts end after their present step."""
        (self.folder / "finish").touch()

    def story(self) -> str:
        """All that is known, for the message of a failed test."""
        said = [f"--- {' '.join(c.argv[2:])}\n{c.text}" for c in self.commands]
        return "\n".join([*said, "--- log", *map(str, self.events()[-20:])])

    # ---- what is left ---------------------------------------------------------------------------

    def living(self, *, zombies: bool = False) -> list[psutil.Process]:
        """Processes that were started from here, directly or not, and live."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) != str(self.folder):
                    continue
                if zombies or process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue  # It ended meanwhile or belongs to somebody else.
        return found

    def agents(self) -> list[psutil.Process]:
        """The agents that a launcher has started for `--local-nodes`."""
        return self.running("node")

    def running(self, command: str) -> list[psutil.Process]:
        """The processes of one of Holdfast's own commands: "master", "node"."""
        found = []
        for process in self.living():
            try:
                if process.cmdline()[1:4] == ["-m", "holdfast.cli", command]:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def expect_nothing_left(self, timeout_s: float = LIMIT_S) -> None:
        """Fail the test if a process or, after orderly ends, a temporary folder is left."""

        def none_lives() -> bool:
            return not self.living()

        try:
            until(none_lives, timeout_s)
        except AssertionError:
            left = [f"{p.pid} {' '.join(p.cmdline())[:150]}" for p in self.living()]
            raise AssertionError(f"left behind: {left}\n{self.story()}") from None

    def kill_all(self, *, node: str = "") -> None:
        """Kill everything, or everything of one node as if its machine were lost; returns when
        nothing of it lives any more."""

        def killed() -> bool:
            living = self.living()
            for process in living.copy():
                try:
                    if node and process.environ().get("STEPS_NODE") != node:
                        living.remove(process)
                    else:
                        process.kill()
                except psutil.Error:
                    continue  # It ended meanwhile; the next look will tell.
            return not living

        until(killed, LIMIT_S)

    def close(self) -> None:
        """Kill what is left, and remove the folder."""
        self.kill_all()
        for command in self.commands:
            command.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def playground() -> Iterator[Jobs]:
    """A `Jobs` in a new folder with a short path, which the paths of sockets need."""
    jobs = Jobs(Path(tempfile.mkdtemp(prefix="j")))
    try:
        yield jobs
    finally:
        # pytest shows it with a test that failed, whatever it was that failed.
        print(jobs.story())
        jobs.close()


def lose_memory_of(agent: int) -> None:
    """Kill an agent and remove its shared memory, as the loss of its host does."""
    # Held still until both are gone: it must not add to its memory, nor a successor find some.
    os.kill(agent, signal.SIGSTOP)
    opened = []
    for descriptor in Path(f"/proc/{agent}/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(descriptor.readlink())
    roots = {path.parent for path in opened if path.name == "lock" and "/holdfast-" in str(path)}
    assert roots, f"agent {agent} holds no checkpoint memory"
    for root in roots:
        shutil.rmtree(root)
    os.kill(agent, signal.SIGKILL)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, be it reaped or not."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_gone(pids: Iterable[int], timeout_s: float = LIMIT_S) -> None:
    """Wait until none of these processes lives."""
    left = set(pids)

    def all_gone() -> bool:
        return all(is_gone(pid) for pid in left)

    until(all_gone, timeout_s, what=f"the end of {sorted(left)}")
