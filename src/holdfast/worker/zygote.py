# SPDX-License-Identifier: Apache-2.0
"""A warm spare: a process that has imported what the workers import, and waits.

Asked to, it becomes a worker within a millisecond or two. Imported once, it is multiplied by fork
(the one that forks is the zygote); where forking would be unsafe, because a module has started a
thread, every spare imports for itself (a one-shot spare). None runs user code before.
"""

import gc
import importlib
import json
import os
import re
import signal
import socket
import sys
import traceback
from typing import Any, NamedTuple

from holdfast.worker import linux
from holdfast.worker.bootstrap import Assignment, RunMode
from holdfast.worker.imports import is_installed

MESSAGE_BYTES_MAX = 256 * 1024

_NOT_FOR_SPARES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEVICE = re.compile(r"/dev/(nvidia|kfd|dri/render|davinci|accel)")
# Not the mark of a test run, by which leftovers are found.
_PER_RANK = re.compile(
    r"(TORCHELASTIC|HOLDFAST(?!_TEST))_\w+|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)"
    r"|ROLE_NAME|MASTER_(ADDR|PORT)|TF_CONFIG"
)


def is_per_rank(variable: str) -> bool:
    """Whether an environment variable may differ between workers or from round to round."""
    return _PER_RANK.fullmatch(variable) is not None


class Settings(NamedTuple):
    agent_pid: int
    socket: int
    once: bool
    """It will never be asked to fork: threads do no harm."""


class _WatchedEnviron(type(os.environ)):  # type: ignore[misc]  # its class has no public name
    """Notes requests for a variable that only a worker has: what a module derives from its rank
    while it is imported would be wrong in every worker forked from here."""

    per_rank_reads: list[str] = []  # noqa: RUF012 (one environment per process)

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            # A spare has no such variable: code that gets here has asked for it by its name.
            if isinstance(key, str) and is_per_rank(key):
                self.per_rank_reads.append(key)
            raise


class Preloader:
    """Imports the learned modules and checks after each that the process is still usable."""

    def __init__(self, *, once: bool) -> None:
        self._once = once
        self._files: dict[str, int] = {}

    def load(self, names: list[str]) -> dict[str, str]:
        """Import in the order given. Stops at the first module that makes the process unusable."""
        # Imports make many objects and little garbage: looking for it is an eighth of their time.
        gc.disable()
        try:
            harm = self._import(names)
        finally:
            gc.enable()
        if harm is not None:
            return {"answer": "tainted"} | harm
        self._remember_files()
        gc.collect()
        gc.freeze()
        return {"answer": "ready"}

    def _import(self, names: list[str]) -> dict[str, str] | None:
        """What the first module that makes the process unusable does; None if none does."""
        for name in names:
            if name in sys.modules:
                continue
            try:
                importlib.import_module(name)
            except (Exception, SystemExit):
                # The worker imports it itself and shows the error to the user, if there is one.
                traceback.print_exc()
            if harm := self._harm():
                return {"module": name} | harm
        return None

    def changed_file(self) -> str | None:
        """A preloaded source file outside the installed packages that has changed since."""
        for file, changed_at in self._files.items():
            if _changed_at(file) != changed_at:
                return file
        return None

    def _harm(self) -> dict[str, str] | None:
        if not self._once and _thread_count() > 1:
            return {"kind": "thread", "why": "it starts a thread when it is imported"}
        if device := _open_device():
            return {"kind": "device", "why": f"it opens {device} when it is imported"}
        if reads := _WatchedEnviron.per_rank_reads:
            return {"kind": "rank", "why": f"it reads {reads[0]} when it is imported"}
        return None

    def _remember_files(self) -> None:
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file not in self._files and not is_installed(file):
                self._files[file] = _changed_at(file)


def _changed_at(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def _thread_count() -> int:
    """The threads that are left once the libraries had their chance to end theirs: a library that
    knows about fork (OpenBLAS) stops its threads before one and starts them again when needed."""
    if len(os.listdir("/proc/self/task")) > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task"))


def _open_device() -> str | None:
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # The descriptor of the listing itself.
        if _DEVICE.match(target):
            return target
    return None


def serve(settings: Settings) -> Assignment | None:
    """Answer the agent until it hangs up. Returns an assignment in a process that is to become a
    worker: the caller runs it with nothing of ours left on the stack but itself."""
    linux.die_with_parent(settings.agent_pid)
    # Signals to every process of the job are for the workers; a spare ends with its agent.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_SPARES}
    channel = socket.socket(fileno=settings.socket)
    channel.set_inheritable(False)
    preloader = Preloader(once=settings.once)
    plain_environ = type(os.environ)
    os.environ.__class__ = _WatchedEnviron
    forked = False
    while True:
        data, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES_MAX, 4)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if "imports" in message:
            _answer(channel, preloader.load(message["imports"]))
        elif file := preloader.changed_file():
            _answer(channel, {"answer": "stale", "why": f"{file} has changed"})
        elif "start" in message:
            break
        elif _fork(channel):
            channel.close()
            channel = socket.socket(fileno=fds.pop())
            forked = True
        for fd in fds:
            os.close(fd)
    for number, handler in before.items():
        signal.signal(number, handler)
    _answer(channel, {"answer": "started", "pid": os.getpid()})
    channel.close()
    os.environ.__class__ = plain_environ
    return _put_on(message, fds, forked=forked)


def _answer(channel: socket.socket, answer: dict[str, Any]) -> None:
    channel.send(json.dumps(answer).encode())


def _fork(channel: socket.socket) -> bool:
    """True in the new process. It is forked through a process that ends at once, so that the kernel
    hands it to the agent, and announced only when that has happened."""
    told, tell = os.pipe()
    try:
        middle = os.fork()
        if middle == 0:
            _fork_and_leave(tell)
            os.close(told)
            os.close(tell)
            return True
    except OSError as error:
        os.close(told)
        os.close(tell)
        _answer(channel, {"answer": "failed", "why": f"it cannot fork: {error.strerror}"})
        return False
    os.close(tell)
    pid = os.read(told, 32)
    os.close(told)
    os.waitpid(middle, 0)
    if pid:
        _answer(channel, {"answer": "forked", "pid": int(pid)})
    else:
        _answer(channel, {"answer": "failed", "why": "it cannot fork"})
    return False


def _fork_and_leave(tell: int) -> None:
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os.write(tell, str(child).encode())
        os._exit(0)
    os.setsid()


def _put_on(message: dict[str, Any], fds: list[int], *, forked: bool) -> Assignment:
    """Take over everything a freshly executed worker would have been given."""
    line, stdout, stderr, *stdin = fds
    for given, stream in ((stdout, 1), (stderr, 2), *((fd, 0) for fd in stdin)):
        os.dup2(given, stream)
        os.close(given)
    os.environ.clear()
    os.environ.update(message["env"])
    os.chdir(message["cwd"])
    numpy_random = sys.modules.get("numpy.random")
    if forked and numpy_random is not None:
        numpy_random.seed()
    assignment = Assignment.from_json(message["start"])._replace(line=line)
    linux.show_as(_command_line(assignment))
    return assignment


def _command_line(assignment: Assignment) -> list[str]:
    option = ["-m"] if assignment.mode is RunMode.MODULE else []
    return [sys.executable, "-u", *option, *assignment.argv]
