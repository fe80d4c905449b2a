# SPDX-License-Identifier: Apache-2.0
"""The copier copies everything exactly, says when, and touches no memory after it was stopped."""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.copier import TURN_BYTES, Copier, Copy, Task, low_priority
from holdfast.checkpoint.memory import address_of, fault_in, touch
from holdfast.model.errors import TimedOutError

WAIT_S = 20.0


@pytest.fixture(params=[1, 2, 4])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    made = Copier(threads=request.param)
    yield made
    made.close()


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
    now, later = bytearray(total + 1), bytearray(total + 1)
    copier.run(copies(source, now, lengths), WAIT_S)
    job = copier.start(copies(source, later, lengths))
    job.wait(WAIT_S)
    assert job.done_before(len(lengths))
    assert now == later == source + b"\0"


def test_what_copies_itself_is_called_once(copier: Copier) -> None:
    source, target = os.urandom(3000), bytearray(3000)
    called: list[int] = []
    first, second = copies(source, target, [1000, 2000])
    copier.run([first, lambda: called.append(1), second, lambda: called.append(2)], WAIT_S)
    assert sorted(called) == [1, 2]
    assert target == source


def test_the_first_can_be_waited_for_before_the_last_is_done(copier: Copier) -> None:
    source, target = os.urandom(2000), bytearray(2000)
    may_go_on = threading.Event()
    first, last = copies(source, target, [1000, 1000])
    job = copier.start([first, lambda: _blocked(may_go_on), last])
    job.wait_before(1, WAIT_S)
    assert target[:1000] == source[:1000]
    assert job.done_before(0)
    assert job.done_before(1)
    assert not job.done_before(2)
    may_go_on.set()
    job.wait(WAIT_S)
    assert target == source


def test_who_waits_helps() -> None:
    """The optimizer step waits for the copies that are left: it does not wait for the one thread
    of the background to do them all."""
    copier = Copier(threads=1)
    source, target = os.urandom(1000), bytearray(1000)
    may_go_on = threading.Event()
    blocking = copier.start([lambda: _blocked(may_go_on)])
    behind = copier.start(copies(source, target, [1000]))
    behind.wait(WAIT_S)
    assert target == source
    assert not blocking.done_before(1)
    may_go_on.set()
    blocking.wait(WAIT_S)
    copier.close()


def test_what_a_task_raises_reaches_who_waits(copier: Copier) -> None:
    """The prior art's saver thread dies silently."""

    def fails() -> None:
        raise OSError("no more pages")

    with pytest.raises(OSError, match="no more pages"):
        copier.run([fails, *copies(b"", bytearray(), [0] * 100)], WAIT_S)
    job = copier.start([lambda: None, fails])
    with pytest.raises(OSError, match="no more pages"):
        job.wait(WAIT_S)
    job.stop(WAIT_S)
    copier.run([lambda: None], WAIT_S)  # The copier itself is as good as before.


def test_a_wait_has_an_end(copier: Copier) -> None:
    may_go_on = threading.Event()
    is_running = threading.Event()

    def blocks() -> None:
        is_running.set()
        _blocked(may_go_on)

    job = copier.start([blocks])
    assert is_running.wait(WAIT_S)
    with pytest.raises(TimedOutError, match=r"not done within 0.05 s: 0 of 1"):
        job.wait(0.05)
    with pytest.raises(TimedOutError, match="did not stop within"):
        job.stop(0.05)
    may_go_on.set()
    job.stop(WAIT_S)


def test_a_stopped_job_touches_no_memory_any_more(copier: Copier) -> None:
    """Otherwise a slot that is unmapped would crash the worker, or another's memory change."""
    source, target = os.urandom(1000), bytearray(1000)
    may_go_on = threading.Event()
    is_running = threading.Event()

    def blocks() -> None:
        is_running.set()
        _blocked(may_go_on)

    job = copier.start([blocks, *copies(source, target, [1000])])
    assert is_running.wait(WAIT_S)
    with pytest.raises(TimedOutError):
        job.stop(0.01)
    may_go_on.set()
    job.stop(WAIT_S)
    assert target == bytes(1000)
    with pytest.raises(TimedOutError, match="was stopped"):
        job.wait(WAIT_S)


def test_sources_are_kept_until_all_is_copied_and_no_longer() -> None:
    class Tensor:
        pass

    copier = Copier(threads=2)
    tensor = Tensor()
    alive = weakref.ref(tensor)
    may_go_on = threading.Event()
    job = copier.start([lambda: _blocked(may_go_on)], keep=[tensor])
    del tensor
    assert alive() is not None
    may_go_on.set()
    job.wait(WAIT_S)
    assert alive() is None
    copier.close()


FORKS = """
import os
from holdfast.checkpoint.copier import Copier, Copy
from holdfast.checkpoint.memory import address_of

copier = Copier(threads=2)
source = os.urandom(50 << 20)

def copy():
    for run in (lambda tasks: copier.run(tasks, 20), lambda tasks: copier.start(tasks).wait(20)):
        target = bytearray(len(source))
        run([Copy(address_of(memoryview(source)), address_of(memoryview(target)), len(source))])
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
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=60)


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
