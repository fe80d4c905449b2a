# SPDX-License-Identifier: Apache-2.0
"""A cgroup for everything that an agent starts, where one can be made.

What is in it can be ended as a whole, also a process that has left its session, has another parent
by now and cleared its environment. That needs version 2 in a kernel from 5.14 on, and the right to
make a group beneath the agent's own: root on a machine, or a unit that systemd delegates. No
controller is turned on in it, so that the limits of the agent's own group hold as before.
"""

import contextlib
import os
from pathlib import Path


def make(name: str, proc: Path = Path("/proc")) -> str:
    """The folder of a new group; empty if none can be made."""
    try:
        folder = _own(proc) / name
        folder.mkdir()
    except OSError:
        return ""
    if (folder / "cgroup.kill").exists():
        return str(folder)
    folder.rmdir()
    return ""


def join(group: str, pid: int) -> None:
    """Put a process into a group; what it starts is in it too."""
    with contextlib.suppress(OSError):
        (Path(group) / "cgroup.procs").write_text(str(pid))


def _own(proc: Path) -> Path:
    """The group of this process; OSError if there is none of version 2."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            folder = _mounted(proc) / line.removeprefix("0::/")
            # The mount may show another part of the tree than the one that the path belongs to.
            if str(os.getpid()) in (folder / "cgroup.procs").read_text().split():
                return folder
    raise FileNotFoundError("no cgroup of version 2")


def _mounted(proc: Path) -> Path:
    for line in (proc / "self/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(folder)
    raise FileNotFoundError("version 2 of cgroups is not mounted")
