# SPDX-License-Identifier: Apache-2.0
"""What Python has no call for: addresses of memory, faulting it in, priorities of threads."""

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MADV_POPULATE_WRITE = 23
_PAGE = 4096
_PIECE = 4 * 1024 * 1024
"""Memory is faulted in by pieces of this size. Meanwhile no other thread of the process can map or
unmap memory, and first touch may run at 0.3 GB/s: that is 14 ms."""

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_THIS_THREAD = 1
_IOPRIO_LOWEST = (2 << 13) | 7  # Best effort, the last of its eight levels.
_NICE = 10


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer; its layout is part of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def address_of(view: memoryview) -> int:
    """Where the view's bytes are; it works for read-only ones too. The view must stay alive."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def fault_in(address: int, length: int, is_stopped: Callable[[], bool] = lambda: False) -> bool:
    """Make writable memory present, so that the first write is as fast as any.

    False if it was stopped, or if there is no memory for it. What is in the memory stays as it is;
    other threads may write to it meanwhile.
    """
    for offset in range(0, length, _PIECE):
        if is_stopped():
            return False
        size = min(_PIECE, length - offset)
        if _LIBC.madvise(address + offset, size, _MADV_POPULATE_WRITE) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                return False  # The file system is full: to touch it would kill this process.
            touch(address + offset, size)
    return True


def touch(address: int, length: int) -> None:
    """For kernels before 5.14: read a byte of every page. A write could undo another thread's."""
    (ctypes.c_char * length).from_address(address)[::_PAGE]


def low_priority() -> None:
    """This thread steps back: all other threads get the processor and the disk first.

    Not SCHED_IDLE: a thread that waits for the processor may hold Python's lock meanwhile, and with
    it the thread that answers the master. At this priority that lasts milliseconds, not seconds.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        _LIBC.syscall(number, _IOPRIO_THIS_THREAD, 0, _IOPRIO_LOWEST)
