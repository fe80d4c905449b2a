# SPDX-License-Identifier: Apache-2.0
"""One container of a pod: processes with a root, a process table and a memory limit of their own.

The root is this machine's, which nothing that is written changes: the "image" of every container
is the virtual environment that runs the tests. When the first process ends the kernel ends all
others; when the thread that started a container ends, or its process, so does the container.
"""

import errno
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/sys/fs/cgroup/memory")
GROUPS = "holdfast-test-"
LIMIT_S = 60.0


@dataclass(frozen=True)
class Mount:
    """A folder or file of this machine that the container sees under a path of its own."""

    source: Path
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Design:
    """What a container shall be."""

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    mounts: Sequence[Mount] = ()
    working_dir: str = "/"
    memory_bytes: int = 0
    """0 for no limit."""
    user: int = 0
    group: int = 0
    more_groups: Sequence[int] = ()
    is_root_read_only: bool = False
    hostname: str = "pod"


@dataclass
class End:
    """How a container ended."""

    exit_code: int
    is_out_of_memory: bool = False

    @property
    def reason(self) -> str:
        if self.is_out_of_memory:
            return "OOMKilled"
        return "Error" if self.exit_code else "Completed"


@dataclass
class Container:
    """A container that runs from the moment it is made, in the network namespace given."""

    design: Design
    folder: Path
    """Of its own: what it writes to its root, and its log."""
    network: Path
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.log = self.folder / "log"
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir()
        self._memory = MemoryLimit(f"{self.folder.parent.name}-{self.design.name}")
        self._memory.set(self.design.memory_bytes)
        script = self.folder / "start.sh"
        script.write_text(start_script(self.design, self.folder, self._memory.folder))
        # A shell stays in between: what it starts is the first process of the new process table,
        # and the shell answers with its exit code, or 128 plus the signal that ended it.
        enter = ["nsenter", f"--net={self.network}"]
        apart = ["unshare", "--mount", "--pid", "--uts", "--ipc"]
        inside = f"setpriv --pdeathsig KILL sh -e {script}; exit $?"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *enter, *apart, "sh", "-c", inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send(self, number: signal.Signals) -> None:
        """A signal to the first process, as a container runtime sends it.

        With SIGKILL the kernel ends all others too.
        """
        try:
            for first in psutil.Process(self._process.pid).children() or [self._process]:
                first.send_signal(number)
        except psutil.NoSuchProcess:
            return

    def wait(self) -> End:
        """Wait for its end, and see to it that the memory limit ends all of it at once.

        So does the kernel in clusters of today (memory.oom.group), so this must be called.
        """
        ended = os.pidfd_open(self._process.pid)
        end = End(0)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.register(self._memory.alarm, select.POLLIN)
            while all(fd != ended for fd, _ in poll.poll()):
                os.eventfd_read(self._memory.alarm)
                if self._memory.is_exhausted():
                    end.is_out_of_memory = True
                    self.send(signal.SIGKILL)
        finally:
            os.close(ended)
        code = self._process.wait(LIMIT_S)
        end.exit_code = code if code >= 0 else 128 - code
        self._memory.close()
        return end


class MemoryLimit:
    """A control group that holds processes still which need more than the limit, and says so."""

    def __init__(self, name: str) -> None:
        self.folder = own_group() / f"{GROUPS}{os.getpid()}-{name}"
        self.folder.mkdir()
        self.alarm = os.eventfd(0)
        control = os.open(self.folder / "memory.oom_control", os.O_RDONLY)
        try:
            register = f"{self.alarm} {control}"
            (self.folder / "cgroup.event_control").write_text(register)
        finally:
            os.close(control)
        (self.folder / "memory.oom_control").write_text("1")

    def set(self, size: int) -> None:
        if size:
            (self.folder / "memory.limit_in_bytes").write_text(str(size))

    def is_exhausted(self) -> bool:
        return "under_oom 1" in (self.folder / "memory.oom_control").read_text()

    def close(self) -> None:
        os.close(self.alarm)
        until(self._is_removed, LIMIT_S)

    def _is_removed(self) -> bool:
        try:
            self.folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True


def remove_remains() -> None:
    """Of tests that were killed there may be control groups without processes."""
    for folder in own_group().glob(f"{GROUPS}*"):
        pid = int(folder.name.removeprefix(GROUPS).partition("-")[0])
        if not psutil.pid_exists(pid):
            with suppress(OSError):  # Another test was faster, or it is still ending.
                folder.rmdir()


def reason_against() -> str:
    """Why containers cannot be made here; empty if they can."""
    if os.getuid() != 0:
        return "run the tests as root"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    try:
        limit = MemoryLimit("probe")
    except OSError as error:
        return f"there are no memory control groups (version 1) to make others in: {error}"
    limit.close()
    return ""


def own_group() -> Path:
    """The memory group of this process, below which it may make others."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return MEMORY / path.lstrip("/")
    raise FileNotFoundError("this machine has no memory control groups of version 1")


def image() -> list[Path]:
    """The folders with this repository, its virtual environment and the Python under that."""
    found: list[Path] = []
    for folder in (ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()):
        if not any(folder.is_relative_to(other) for other in (*found, Path("/usr"))):
            found.append(folder)
    return found


def start_script(design: Design, folder: Path, memory: Path) -> str:
    """A shell script that builds the container around itself and becomes its command."""
    root = folder / "root"
    layers = f"lowerdir=/,upperdir={folder / 'upper'},workdir={folder / 'work'}"
    lines = [
        f"echo 0 > {memory / 'cgroup.procs'}",
        f"hostname {design.hostname}",
        "mount --make-rprivate /",
        f"mount -t overlay overlay -o {layers} {root}",
        f"mount --rbind /dev {root}/dev",
        f"mount --rbind /sys {root}/sys",
        f"mount --bind {memory} {root}{MEMORY}",
        f"mount -t proc proc {root}/proc",
        f"mount -t tmpfs tmp {root}/tmp",
        f"mount -t tmpfs -o size=64m shm {root}/dev/shm",
    ]
    for mount in sorted(design.mounts, key=lambda mount: mount.path):
        # Links in the path are those of the container: /var/run is one.
        lines.append(f"target={root}$(chroot {root} readlink -m {shlex.quote(mount.path)})")
        make = 'mkdir -p "$target"'
        if mount.source.is_file():
            make = 'mkdir -p "$(dirname "$target")"; touch "$target"'
        lines += [make, f'mount --bind {shlex.quote(str(mount.source))} "$target"']
        if mount.read_only:
            lines.append('mount -o remount,bind,ro "$target"')
    for source in image():
        # They may be on file systems of their own, or below a folder that is another one here.
        target = shlex.quote(f"{root}{source}")
        lines += [f"mkdir -p {target}", f"mount --bind {shlex.quote(str(source))} {target}"]
        lines.append(f"mount -o remount,bind,ro {target}")
    lines.append(f"mkdir -p {root}{shlex.quote(design.working_dir)}")
    if design.user:
        # This machine's Python may be in the folder of its administrator.
        lines.append(f"chmod go+rx {root}/root")
    if design.is_root_read_only:
        lines.append(f"mount -o remount,ro {root}")
    # Groups that are not named are dropped.
    groups = ",".join(str(group) for group in design.more_groups)
    who = f"--reuid {design.user} --regid {design.group}"
    who += f" --groups {groups}" if groups else " --clear-groups"
    env = " ".join(shlex.quote(f"{name}={value}") for name, value in design.env.items())
    command = " ".join(shlex.quote(word) for word in design.command)
    enter = f"env -C {shlex.quote(design.working_dir)} -i {env}"
    lines.append(f"exec chroot {root} setpriv {who} {enter} {command}")
    return "\n".join(lines) + "\n"
