# SPDX-License-Identifier: Apache-2.0
"""The copier copies everything exactly, says when, and touches no memory after it was stopped."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.checkpoint.copier import (
    COPY_WITH_CRC,
    TURN_BYTES,
    Copier,
    Copy,
    CopyBytes,
    CopyJob,
    Task,
    streaming_copy,
)
from holdfast.checkpoint.memory import address_of, fault_in, low_priority, touch
from holdfast.model.errors import TimedOutError

WAIT_S = 120.0
NOT_BUILT = "holdfast.checkpoint.not_built"
LINE = 64

is_built = pytest.mark.skipif(
    COPY_WITH_CRC is None, reason="the C extension was not built: there was no compiler"
)


@pytest.fixture(
    params=[
        pytest.param(COPY_WITH_CRC, marks=is_built, id="extension"),
        pytest.param(ctypes.memmove, id="C library"),
    ]
)
def copy_bytes(request: pytest.FixtureRequest) -> CopyBytes:
    made: CopyBytes = request.param
    return made


@pytest.fixture(params=[1, 2, 4])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    made = Copier(threads=request.param)
    yield made
    made.close()


@pytest.fixture(params=[1, 3])
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(request.param) as made:
        yield made


def begun(pool: ThreadPoolExecutor, tasks: Sequence[Task]) -> CopyJob:
    """A job that other threads work on."""
    job = CopyJob(tasks)
    job.attach(pool, 3)
    return job


def copies(source: bytes, target: bytearray, lengths: list[int]) -> list[Task]:
    """Copies of these lengths, one behind the other."""
    tasks: list[Task] = []
    begin = 0
    for length in lengths:
        tasks.append(
            Copy(
                address_of(memoryview(source)) + begin,
                address_of(memoryview(target)) + begin,
                length,
            )
        )
        begin += length
    return tasks


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [1],
        [TURN_BYTES],
        [TURN_BYTES - 1, 2, 0, 3],
        [2 * TURN_BYTES + 5, 7],
        [97] * 5000,
    ],
    ids=["nothing", "no bytes", "one byte", "one turn", "over the edge", "three turns", "many"],
)
def test_every_byte_is_copied_and_no_other(copier: Copier, lengths: list[int]) -> None:
    total = sum(lengths)
    source = os.urandom(total)
    target = bytearray(total + 1)
    copier.run(copies(source, target, lengths), WAIT_S)
    assert target == source + b"\0"


def check_copy(
    copy_bytes: CopyBytes, source: bytes, length: int, begins: Sequence[tuple[int, int]]
) -> None:
    """Copy to and from these offsets, counted from the begin of a line of the cache."""
    room = bytearray(length + 4 * LINE)
    at_line = -address_of(memoryview(room)) % LINE
    source_line = -address_of(memoryview(source)) % LINE
    for target_begin, source_begin in begins:
        target, first = at_line + LINE + target_begin, source_line + source_begin
        room[:] = b"\xa5" * len(room)
        copy_bytes(
            address_of(memoryview(room)) + target, address_of(memoryview(source)) + first, length
        )
        before, after = room[:target], room[target + length :]
        assert room[target : target + length] == source[first : first + length]
        assert before == b"\xa5" * len(before)
        assert after == b"\xa5" * len(after)


def test_every_alignment_and_every_short_length(copy_bytes: CopyBytes) -> None:
    source = os.urandom(4 * LINE + 200)
    begins = [(target, first) for target in range(LINE) for first in range(17)]
    for length in range(201):
        # All of them only for some: a line is copied in four steps of 16 bytes.
        few = begins if length % LINE in (0, 1, LINE - 1) else begins[length % 23 :: 23]
        check_copy(copy_bytes, source, length, few)


@pytest.mark.parametrize("length", [4096, 1 << 20, (1 << 20) + LINE - 1, TURN_BYTES + 1])
def test_long_copies_end_where_they_should(copy_bytes: CopyBytes, length: int) -> None:
    source = os.urandom(length + 2 * LINE)
    check_copy(copy_bytes, source, length, [(0, 0), (1, 0), (0, 1), (63, 17)])


def test_the_last_bytes_of_mapped_memory_can_be_copied(copy_bytes: CopyBytes) -> None:
    """What lies behind a tensor may not be mapped: nothing may be read or written there."""
    size = 1 << 16
    with mmap.mmap(-1, size) as source, mmap.mmap(-1, size) as target:
        source[:] = os.urandom(size)
        with memoryview(source) as from_view, memoryview(target) as to_view:
            copy_bytes(address_of(to_view) + 3, address_of(from_view) + 3, size - 3)
        assert target[:] == b"\0\0\0" + source[3:]


def test_other_threads_run_during_a_copy(copy_bytes: CopyBytes) -> None:
    """The training must not stand still: only who runs meanwhile can see a copy half done."""
    length = 4 * TURN_BYTES
    # Which one is first is not known: the C library may begin at the end.
    one, other = TURN_BYTES, 3 * TURN_BYTES
    source, target = bytearray(b"\1" * length), bytearray(length)
    addresses = address_of(memoryview(target)), address_of(memoryview(source))
    deadline = time.monotonic() + WAIT_S
    is_seen = False
    while not is_seen and time.monotonic() < deadline:
        target[one] = target[other] = 0
        thread = threading.Thread(target=copy_bytes, args=(*addresses, length))
        thread.start()
        while thread.is_alive() and not is_seen:
            is_seen = target[one] > target[other] or target[other] > target[one]
        thread.join(WAIT_S)
    assert is_seen


def test_an_installation_without_the_extension_is_no_error() -> None:
    """It is optional: the C library copies, and the agent computes digests (test_writing.py)."""
    assert streaming_copy(NOT_BUILT) is None


@is_built
@pytest.mark.parametrize("given", [(1, 1, -1), (1, 1), ("1", 1, 1), (1, 1, 2**70)])
def test_the_extension_refuses_what_it_cannot_copy(given: Sequence[object]) -> None:
    assert COPY_WITH_CRC is not None
    with pytest.raises((TypeError, ValueError, OverflowError)):
        COPY_WITH_CRC(*given)  # type: ignore[arg-type]


def test_what_copies_itself_is_called_once(copier: Copier) -> None:
    source, target = os.urandom(3000), bytearray(3000)
    called: list[int] = []
    first, second = copies(source, target, [1000, 2000])
    copier.run([first, lambda: called.append(1), second, lambda: called.append(2)], WAIT_S)
    assert sorted(called) == [1, 2]
    assert target == source


def test_who_waits_helps() -> None:
    """The optimizer step waits for the copies that are left: it does not wait for the one thread
    of the background to do them all."""
    source, target = os.urandom(1000), bytearray(1000)
    may_go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        blocking = begun(pool, [lambda: _blocked(may_go_on)])
        begun(pool, copies(source, target, [1000])).wait(WAIT_S)
        assert target == source
        assert not may_go_on.is_set()
        may_go_on.set()
        blocking.wait(WAIT_S)


def test_what_a_task_raises_reaches_who_waits(copier: Copier, pool: ThreadPoolExecutor) -> None:
    """The prior art's saver thread dies silently."""

    def fails() -> None:
        raise OSError("no more pages")

    with pytest.raises(OSError, match="no more pages"):
        copier.run([fails, *copies(b"", bytearray(), [0] * 100)], WAIT_S)
    job = begun(pool, [lambda: None, fails])
    with pytest.raises(OSError, match="no more pages"):
        job.wait(WAIT_S)
    job.stop(WAIT_S)
    copier.run([lambda: None], WAIT_S)  # The copier itself is as good as before.


def test_a_wait_has_an_end(pool: ThreadPoolExecutor) -> None:
    may_go_on = threading.Event()
    is_running = threading.Event()

    def blocks() -> None:
        is_running.set()
        _blocked(may_go_on)

    job = begun(pool, [blocks])
    assert is_running.wait(WAIT_S)
    with pytest.raises(TimedOutError, match=r"not done within 0.05 s: 0 of 1"):
        job.wait(0.05)
    with pytest.raises(TimedOutError, match="did not stop within"):
        job.stop(0.05)
    may_go_on.set()
    job.stop(WAIT_S)


def test_a_stopped_job_touches_no_memory_any_more() -> None:
    """Otherwise a slot that is unmapped would crash the worker, or another's memory change."""
    source, target = os.urandom(1000), bytearray(1000)
    may_go_on = threading.Event()
    is_running = threading.Event()

    def blocks() -> None:
        is_running.set()
        _blocked(may_go_on)

    with ThreadPoolExecutor(1) as pool:
        job = begun(pool, [blocks, *copies(source, target, [1000])])
        assert is_running.wait(WAIT_S)
        with pytest.raises(TimedOutError):
            job.stop(0.01)
        may_go_on.set()
        job.stop(WAIT_S)
        assert target == bytes(1000)
        with pytest.raises(TimedOutError, match="was stopped"):
            job.wait(WAIT_S)


FORKS = """
import os
from holdfast.checkpoint.copier import Copier, Copy
from holdfast.checkpoint.memory import address_of

copier = Copier(threads=2)
source = os.urandom(50 << 20)

def copy():
    target = bytearray(len(source))
    copy = Copy(address_of(memoryview(source)), address_of(memoryview(target)), len(source))
    copier.run([copy], 20)
    assert target == source

copy()
child = os.fork()
copy()
if child == 0:
    copier.close()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
copier.close()
"""


def test_a_forked_child_has_its_own_threads() -> None:
    """Data loaders fork: the parent's threads are not there, and must not be waited for."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)


def test_low_priority_is_for_one_thread_only() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def lowered() -> None:
        low_priority()
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=lowered)
    thread.start()
    thread.join(WAIT_S)
    assert seen[0] > before
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_faulting_in_keeps_what_is_there_and_can_be_stopped() -> None:
    memory = bytearray(os.urandom(1 << 20))
    before = bytes(memory)
    view = memoryview(memory)
    # Anonymous memory is not page aligned, which the kernel refuses: the fallback is used.
    assert fault_in(address_of(view), len(memory))
    touch(address_of(view), len(memory))
    assert not fault_in(address_of(view), len(memory), is_stopped=lambda: True)
    assert memory == before


def _blocked(may_go_on: threading.Event) -> None:
    assert may_go_on.wait(WAIT_S)
