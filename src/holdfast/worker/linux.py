# SPDX-License-Identifier: Apache-2.0
"""The Linux process attributes Python has no call for. The only place that uses ctypes."""

import ctypes
import mmap
import os
import signal
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MADV_POPULATE_READ = 22
_ARG_BEGIN = 45  # Field 48 of /proc/PID/stat, counted from the one after the name.


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def become_subreaper() -> None:
    """Orphaned descendants of this process become its children, not those of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent ends; end at once if it is not the parent any more."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def show_as(argv: Sequence[str]) -> None:
    """Let `ps` and `pgrep -f` show this command line, as far as there is room for it.

    The kernel reads a process's command line from the process's own memory, where the arguments
    it was executed with still are; Python made its copies of them long ago.
    """
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    begin, end = (int(field) for field in fields[_ARG_BEGIN : _ARG_BEGIN + 2])
    room = end - begin
    if begin and room > 0:
        text = b"\0".join(os.fsencode(word) for word in argv)[: room - 1]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)


def make_present(mapping: mmap.mmap, start: int, length: int) -> bool:
    """Enter this part of a mapping into the page tables; False if this kernel (< 5.14) cannot.

    Python's own call for it would keep its lock meanwhile.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = ctypes.c_char.from_buffer(mapping, start)
    size = min(length, len(mapping) - start)
    return bool(libc.madvise(ctypes.addressof(first), size, _MADV_POPULATE_READ) == 0)
