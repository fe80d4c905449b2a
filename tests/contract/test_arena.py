# SPDX-License-Identifier: Apache-2.0
"""Who gets which slot, what is never overwritten, and what becomes of the memory of the dead."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from holdfast.checkpoint.arena import Arena, Busy, Held, PartKey
from holdfast.checkpoint.digests import Sidecar, read_sidecar, sidecar_path, write_sidecar
from holdfast.checkpoint.room import is_in_memory, limits_of_group, tightest
from holdfast.checkpoint.roots import safe_name
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version
from holdfast.model.errors import RejectedError, StateError
from tests.disks import small_disk
from tests.waiting import until

MIB = 1024 * 1024
SIZE = 100_000
KEY = PartKey("/ckpt", "shared")
READY_S = 120.0


@pytest.fixture
def memory() -> Iterator[Path]:
    """Real shared memory; the name lets the check at the end of the run find what is left."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def arena(memory: Path) -> Iterator[Arena]:
    opened = Arena(memory, "cats", "node-0")
    yield opened
    opened.close()


def fill(path: Path, step: int, key: PartKey = KEY, size: int = SIZE, lineage: int = 1) -> None:
    """What a worker does with a grant."""
    version = Version(lineage, step)
    files, _ = lay_out([("f", size)])
    with Slot.open(path, writable=True) as slot:
        slot.begin(version)
        slot.data[:size] = bytes([step % 256]) * size
        slot.seal(SlotMeta(key.directory, key.part, version, Shape(1, True), files))


def die(arena: Arena) -> None:
    """What is left when an agent is killed: its memory, and nobody who has its lock."""
    aside = arena.root.with_name("aside")
    arena.root.rename(aside)
    arena.close()
    aside.rename(arena.root)


def save(
    arena: Arena, step: int, slots: int = 2, key: PartKey = KEY, size: int = SIZE, more: int = 0
) -> Held:
    path = granted(arena, size, slots, key, more=more)
    fill(path, step, key, size)
    return arena.sealed(path)


def granted(
    arena: Arena,
    size: int,
    slots: int,
    key: PartKey = KEY,
    avoid: frozenset[str] = frozenset(),
    more: int = 0,
) -> Path:
    """A grant, as soon as there is memory for it."""
    answer = arena.grant(key, size, slots, avoid, more)
    while isinstance(answer, Busy):
        assert answer.retry is not None, answer.why
        assert "being set aside" in answer.why
        answer.retry.exception(READY_S)
        answer = arena.grant(key, size, slots, avoid, more)
    return answer


def steps(arena: Arena, directory: str = "/ckpt") -> list[int]:
    return [held.meta.version.step for held in arena.holdings(directory)]


# ---- grants -----------------------------------------------------------------


def test_the_newest_sealed_slot_is_never_given_away(arena: Arena) -> None:
    """The prior art copies into its only buffer: a death while copying loses the checkpoint."""
    for step in range(10):
        path = arena.grant(KEY, SIZE, 2)
        assert isinstance(path, Path)
        assert step - 1 in steps(arena) or step == 0
        fill(path, step)
        arena.sealed(path)
    assert steps(arena) == [9, 8]


def test_three_slots_keep_two_while_one_is_written(arena: Arena) -> None:
    for step in range(5):
        save(arena, step, slots=3)
    arena.grant(KEY, SIZE, 3)
    assert steps(arena) == [4, 3]


def test_one_slot_is_overwritten_by_explicit_setting(arena: Arena) -> None:
    first = save(arena, 1, slots=1)
    second = save(arena, 2, slots=1)
    assert second.path == first.path
    assert steps(arena) == [2]


def test_the_newest_is_the_higher_lineage_not_the_higher_step(arena: Arena) -> None:
    """After a rollback the prior art takes the abandoned future for the newest state."""
    save(arena, 100)
    path = arena.grant(KEY, SIZE, 2)
    assert isinstance(path, Path)
    fill(path, 50, lineage=2)
    arena.sealed(path)
    assert steps(arena) == [50, 100]
    save(arena, 51)
    assert 50 in steps(arena)


def test_a_pinned_slot_is_not_given_away(arena: Arena) -> None:
    """The prior art's saver reads the buffer while the next save writes it."""
    old, new = save(arena, 1), save(arena, 2)
    with arena.pin(old.path, "on its way to storage"):
        # Only the newest is left, which the other ranks may still need: there is one slot more.
        path = granted(arena, SIZE, 2)
        assert path not in (old.path, new.path)
        arena.give_back(path)
        with arena.pin(new.path, "being copied to node 3"):
            spare = granted(arena, SIZE, 2)
            assert spare not in (old.path, new.path)
            busy = arena.grant(KEY, SIZE, 2)
            assert isinstance(busy, Busy)
            assert "being copied to node 3, being written, on its way to storage" in busy.why
            arena.give_back(spare)
    assert len(steps(arena)) == 2


def test_a_newest_that_would_be_overwritten_each_time_gets_a_neighbour(arena: Arena) -> None:
    """What is safe and what goes to storage are held still for long: while the master is away."""
    stored, safe = save(arena, 50, slots=3), save(arena, 51, slots=3)
    with arena.pin(stored.path, "on its way to storage"), arena.pin(safe.path, "it is safe"):
        save(arena, 52, slots=3)
        until(lambda: can_be_written_without(arena, 52), READY_S, "one slot more")
        for step in range(53, 60):
            assert can_be_written_without(arena, step - 1)
            save(arena, step, slots=3)
        assert steps(arena) == [59, 58, 51, 50]
    save(arena, 60, slots=3)
    assert len(steps(arena)) == 3, "the memory is given back when the others are free again"


def can_be_written_without(arena: Arena, newest: int) -> bool:
    """Whether a save now leaves the newest step in memory."""
    path = arena.grant(KEY, SIZE, 3)
    assert isinstance(path, Path)
    is_kept = newest in steps(arena)
    arena.give_back(path)
    return is_kept


def test_the_only_sealed_slot_is_kept_while_the_other_is_written(arena: Arena) -> None:
    save(arena, 1)
    assert isinstance(arena.grant(KEY, SIZE, 2), Path)
    busy = arena.grant(KEY, SIZE, 2)
    assert isinstance(busy, Busy)
    assert "being written" in busy.why
    assert steps(arena) == [1]


def test_a_pin_is_released_once(arena: Arena) -> None:
    held = save(arena, 1)
    one, two = arena.pin(held.path, "a"), arena.pin(held.path, "b")
    one.release()
    one.release()
    with pytest.raises(StateError, match="in use"):
        arena.drop(held.path)
    two.release()
    arena.drop(held.path)
    assert steps(arena) == []
    assert not held.path.exists()


def test_a_dead_worker_s_slot_is_free_again(arena: Arena) -> None:
    save(arena, 1)
    path = arena.grant(KEY, SIZE, 2)
    assert isinstance(path, Path)
    with Slot.open(path, writable=True) as slot:
        slot.begin(Version(1, 2))
    arena.give_back(path)
    assert steps(arena) == [1]
    assert arena.grant(KEY, SIZE, 2) == path


def test_a_grant_that_was_not_used_loses_nothing(arena: Arena) -> None:
    save(arena, 1)
    save(arena, 2)
    path = arena.grant(KEY, SIZE, 2)
    assert isinstance(path, Path)
    arena.give_back(path)
    assert steps(arena) == [2, 1]


def test_memory_that_was_never_used_is_written_last(arena: Arena) -> None:
    """Its first touch takes seconds: while it waits for that, a save goes to a slot in use."""
    oldest = save(arena, 1)
    newest = save(arena, 2)
    (unused,) = set(arena.reserve(KEY, SIZE, 3)) - {oldest.path, newest.path}
    avoid = frozenset([str(unused)])
    assert arena.grant(KEY, SIZE, 3, avoid) == oldest.path
    arena.give_back(oldest.path)
    with arena.pin(oldest.path, "it is read"):
        assert granted(arena, SIZE, 3, avoid=avoid) == unused
    arena.give_back(unused)
    assert steps(arena) == [2, 1]
    assert granted(arena, SIZE, 3) == unused


def test_what_is_void_goes_and_its_memory_stays(arena: Arena) -> None:
    """Memory that is given back may be taken by others, and the next save finds none."""
    older, newer = save(arena, 1), save(arena, 2)
    with arena.pin(newer.path, "it is read"), pytest.raises(StateError, match="in use"):
        arena.empty(newer.path)
    arena.empty(newer.path)
    assert steps(arena) == [1]
    assert newer.path.stat().st_blocks > 0
    assert arena.grant(KEY, SIZE, 2) == newer.path
    assert older.path.exists()


def test_what_is_not_sealed_cannot_be_reported_as_sealed(arena: Arena) -> None:
    path = arena.grant(KEY, SIZE, 2)
    assert isinstance(path, Path)
    with pytest.raises(StateError, match="reported as sealed, but it is not"):
        arena.sealed(path)
    with pytest.raises(StateError, match="no memory slot"):
        arena.sealed("/dev/shm/other")


def test_a_slot_of_one_part_does_not_take_another(arena: Arena) -> None:
    path = arena.grant(KEY, SIZE, 2)
    assert isinstance(path, Path)
    fill(path, 1, PartKey("/other", "rank-00001"))
    with pytest.raises(StateError, match="shared of /ckpt, but rank-00001 of /other"):
        arena.sealed(path)
    assert arena.holdings() == []


def test_old_digests_go_when_a_slot_is_written_again(arena: Arena) -> None:
    held = save(arena, 1, slots=1)
    write_sidecar(held.path, Sidecar(held.meta.version, 1))
    assert save(arena, 1, slots=1).path == held.path
    assert read_sidecar(held.path) is None


def test_a_writer_that_dies_before_its_first_byte_leaves_the_digest_of_what_is_there(
    arena: Arena,
) -> None:
    """Without it nobody can tell whether these bytes change later."""
    held = save(arena, 1, slots=1)
    write_sidecar(held.path, Sidecar(held.meta.version, 1))
    arena.give_back(granted(arena, SIZE, slots=1))
    assert steps(arena) == [1]
    assert read_sidecar(held.path) == Sidecar(held.meta.version, 1)


def test_a_larger_state_gets_larger_slots_and_loses_nothing(arena: Arena) -> None:
    """The prior art freezes the layout at the first save."""
    save(arena, 1)
    save(arena, 2)
    for step, size in ((3, 300_000), (4, 500_000), (5, 70_000), (6, 2 * MIB)):
        path = granted(arena, size, 2)
        assert step - 1 in steps(arena)
        fill(path, step, size=size)
        arena.sealed(path)
    assert steps(arena) == [6, 5]
    assert len(list(arena.root.glob("*/shared.*"))) == 2


def test_a_smaller_setting_gives_memory_back(arena: Arena) -> None:
    for step in range(4):
        save(arena, step, slots=4)
    save(arena, 4, slots=2)
    assert steps(arena) == [4, 3]
    assert len(list(arena.root.glob("*/shared.*"))) == 2


def test_parts_and_directories_do_not_mix(arena: Arena) -> None:
    save(arena, 1)
    save(arena, 2, key=PartKey("/ckpt", "rank-00000"))
    save(arena, 3, key=PartKey("/ckpt", "rank-00000", node=7))
    save(arena, 4, key=PartKey("/elsewhere", "shared"))
    assert steps(arena) == [3, 2, 1]
    assert steps(arena, "/elsewhere") == [4]
    assert len(arena.holdings()) == 4


@pytest.mark.parametrize("part", ["../x", "a/b", "a@1", "a.1", ""])
def test_a_part_cannot_leave_the_arena_by_its_name(arena: Arena, part: str) -> None:
    with pytest.raises(RejectedError, match="cannot be called"):
        arena.grant(PartKey("/ckpt", part), SIZE, 2)


# ---- removed by others ------------------------------------------------------


@pytest.mark.parametrize("size", [SIZE, 6 * MIB], ids=["at once", "in the background"])
def test_slots_that_others_remove_are_replaced(arena: Arena, size: int) -> None:
    """systemd does that to all shared memory of a user whose last session has ended."""
    for step in (1, 2):
        save(arena, step, size=size)
    pin = arena.pin(arena.holdings()[0].path, "it is read")
    writing = granted(arena, size, 2)
    shutil.rmtree(arena.root)
    assert steps(arena) == []
    for step in range(3, 8):
        save(arena, step, size=size)
    assert steps(arena) == [7, 6]
    assert len(arena.reserve(KEY, size, 2)) == 2
    assert arena.lost == 2
    pin.release()
    arena.give_back(writing)
    with pytest.raises(StateError, match="there is no memory slot"):
        arena.sealed(writing)
    assert steps(arena) == [7, 6]


def test_a_single_slot_that_others_remove_is_replaced(arena: Arena) -> None:
    save(arena, 1)
    save(arena, 2).path.unlink()
    assert steps(arena) == [1]
    (reserved,) = set(arena.reserve(KEY, SIZE, 2)) - {arena.holdings()[0].path}
    reserved.unlink()
    save(arena, 3)
    assert steps(arena) == [3, 1]


def test_a_root_whose_lock_others_remove_is_locked_again(memory: Path) -> None:
    """Without it another agent would take what is there for left by a dead one."""
    with closing(Arena(memory, "cats", "node-0")) as arena:
        save(arena, 1)
        (arena.root / "lock").unlink()
        save(arena, 2)
        with closing(Arena(memory, "cats", "node-1")) as other:
            assert other.adopt() == []
        assert steps(arena) == [2, 1]


def test_a_memory_folder_that_is_gone_is_one_without_room(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with closing(Arena(memory, "cats", "node-0")) as arena:
        save(arena, 1)
        shutil.rmtree(memory)
        for _ in range(2):
            with pytest.raises(RejectedError, match=r"could not be set aside .*: No such file"):
                arena.grant(KEY, SIZE, 2)
        memory.mkdir()
        save(arena, 2)
        assert steps(arena) == [2]


# ---- setting aside ----------------------------------------------------------


def test_reserved_slots_become_ready_in_the_background(arena: Arena) -> None:
    paths = arena.reserve(KEY, 30 * MIB, 2)
    assert len(paths) == 2
    assert arena.reserve(KEY, 30 * MIB, 2) == paths
    for _ in paths:
        path = granted(arena, 30 * MIB, 2)
        assert path in paths
        assert path.stat().st_blocks * 512 >= 30 * MIB


def test_ready_memory_is_preferred(arena: Arena) -> None:
    (first,) = arena.reserve(KEY, 50 * MIB, 1)
    arena.give_back(granted(arena, 50 * MIB, 1))
    arena.reserve(KEY, 50 * MIB, 3)
    assert arena.grant(KEY, 50 * MIB, 3) == first


def test_closing_stops_setting_aside_and_leaves_nothing(memory: Path) -> None:
    arena = Arena(memory, "cats", "node-0")
    arena.reserve(KEY, 200 * MIB, 3)
    arena.close()
    assert list(memory.iterdir()) == []


# ---- room -------------------------------------------------------------------


def test_too_little_memory_is_said_with_the_sizes_and_the_limit(arena: Arena) -> None:
    save(arena, 1)
    with pytest.raises(
        RejectedError,
        match=r"no room for part shared: 1 more slots of 1024.0 GiB .* can be had \(the .* is ",
    ):
        arena.reserve(KEY, 1 << 40, 2)
    with pytest.raises(RejectedError, match="no room for part shared"):
        arena.grant(KEY, 1 << 40, 2)
    assert steps(arena) == [1], "what was there is still there"
    save(arena, 2)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "size=20m") as folder:
        yield folder


def test_a_small_file_system_is_a_limit(small_memory: Path) -> None:
    """The prior art creates the segment anyway; the worker dies of SIGBUS at the first write."""
    arena = Arena(small_memory, "cats", "node-0")
    assert tightest(small_memory).limit == f"the size of {small_memory}"
    save(arena, 1, size=5 * MIB)
    save(arena, 2, size=5 * MIB)
    with pytest.raises(RejectedError, match=rf"the size of {small_memory} is 20.0 MiB"):
        arena.grant(PartKey("/ckpt", "rank-00000"), 10 * MIB, 2)
    with pytest.raises(RejectedError, match=r"more slots of 16\.1 MiB are needed"):
        arena.grant(KEY, 16 * MIB, 2)
    assert steps(arena) == [2, 1]
    # The slot that is replaced counts as free, and is: nobody else has its memory open.
    save(arena, 3, size=12 * MIB)
    assert steps(arena) == [3, 2]
    arena.close()


def test_with_room_for_two_slots_of_three_two_have_to_do(small_memory: Path) -> None:
    """A state of 30 MB in the 64 MB of a container is saved at every step all the same."""
    with closing(Arena(small_memory, "cats", "node-0")) as arena:
        for step in range(1, 6):
            save(arena, step, slots=3, size=8 * MIB)
        assert steps(arena) == [5, 4]
        older = arena.holdings()[1]
        with (
            arena.pin(older.path, "on its way to storage"),
            pytest.raises(RejectedError, match="no room for part shared"),
        ):
            arena.grant(KEY, 8 * MIB, 3)
        assert arena.grant(KEY, 8 * MIB, 3) == older.path


def test_when_all_slots_are_in_use_there_may_be_more_for_a_while(arena: Arena) -> None:
    """A storage that fails holds two versions still, and the newest may be the only copy."""
    with ExitStack() as held:
        for step in (1, 2, 3):
            held.enter_context(arena.pin(save(arena, step, slots=3).path, "goes to storage"))
        assert isinstance(arena.grant(KEY, SIZE, 3), Busy)
        save(arena, 4, slots=3, more=1)
        assert steps(arena) == [4, 3, 2, 1]
        held.enter_context(arena.pin(arena.holdings()[0].path, "goes to storage"))
        assert isinstance(arena.grant(KEY, SIZE, 3, more=1), Busy)
    for step in (5, 6):
        save(arena, step, slots=3)
    assert len(steps(arena)) == 3


def test_there_are_no_more_slots_where_memory_is_tight(small_memory: Path) -> None:
    with closing(Arena(small_memory, "cats", "node-0")) as arena, ExitStack() as held:
        for step in (1, 2):
            held.enter_context(arena.pin(save(arena, step, size=6 * MIB).path, "goes to storage"))
        assert isinstance(arena.grant(KEY, 6 * MIB, 2, more=1), Busy)


def test_no_slot_is_added_where_memory_is_tight(small_memory: Path) -> None:
    """As much again must stay free for the training itself."""
    with closing(Arena(small_memory, "cats", "node-0")) as arena:
        older = save(arena, 1, size=6 * MIB)
        for step in range(2, 6):
            with arena.pin(older.path, "on its way to storage"):
                save(arena, step, size=6 * MIB)
        assert steps(arena) == [5, 1]


def test_memory_that_others_took_meanwhile_is_a_clear_error(small_memory: Path) -> None:
    arena = Arena(small_memory, "cats", "node-0")
    other = small_memory / "other"
    with other.open("wb") as file, ExitStack() as stack:
        stack.callback(arena.close)
        # Sparse: when it grows under our feet, what was free at the check is not any more.
        arena.reserve(KEY, 17 * MIB, 1)
        with suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, 18 * MIB)
        problem = ""
        try:
            arena.give_back(granted(arena, 17 * MIB, 1))
        except RejectedError as exc:
            problem = str(exc)
        if not problem:  # We were faster.
            save(arena, 1, slots=1, size=17 * MIB)
            return
        assert re.search(r"17.1 MiB of room for shared .* No space left", problem)
        other.unlink()
        os.ftruncate(file.fileno(), 0)
        save(arena, 2, slots=1, size=17 * MIB)


FAULT_IN = """
import mmap, sys
from holdfast.checkpoint.memory import address_of, fault_in
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    with memoryview(mapped) as view:
        print(fault_in(address_of(view), len(view)))
"""


def test_to_touch_memory_that_is_not_there_kills_nobody(small_memory: Path) -> None:
    """The kernel answers it with SIGBUS."""
    sparse = small_memory / "sparse"
    with sparse.open("wb") as file:
        file.truncate(40 * MIB)
    words = [sys.executable, "-c", FAULT_IN, str(sparse)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=READY_S, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "False"), ran.stderr


def test_only_what_is_in_memory_counts_against_the_memory(small_memory: Path) -> None:
    assert is_in_memory(small_memory)
    assert not is_in_memory(Path("/proc"))


def test_control_groups_of_both_versions_are_limits(tmp_path: Path) -> None:
    group = tmp_path / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "a" / "memory.max").write_text("4294967296\n")
    (tmp_path / "a" / "memory.current").write_text("1073741824\n")
    (tmp_path / "a" / "memory.stat").write_text("anon 5\ninactive_file 1048576\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    (room,) = limits_of_group(tmp_path, "/a/b")
    assert (room.total, room.available) == (4 << 30, (3 << 30) + MIB - 256 * MIB)

    old = tmp_path / "old"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("17179869184\n")
    (old / "memory.usage_in_bytes").write_text("0\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "memory.usage_in_bytes").write_text("5\n")
    (room,) = limits_of_group(tmp_path, "/old")
    assert room.available == (16 << 30) - int((16 << 30) * 0.05)
    assert "control group" in room.limit


# ---- whose memory -----------------------------------------------------------


def test_memory_is_private_and_gone_at_the_end(memory: Path) -> None:
    arena = Arena(memory, "cats", "node-0")
    held = save(arena, 1)
    places = [held.path, *held.path.relative_to(memory).parents][:-1]
    for place in places:
        found = memory / place
        assert found.stat().st_mode & 0o777 == (0o600 if found.is_file() else 0o700)
    assert (arena.root / "lock").stat().st_mode & 0o777 == 0o600
    arena.close()
    assert list(memory.iterdir()) == []


def test_a_directory_that_somebody_else_prepared_is_refused(memory: Path) -> None:
    trap = memory / f"holdfast-{os.getuid()}"
    target = memory / "elsewhere"
    target.mkdir()
    trap.symlink_to(target)
    with pytest.raises(StateError, match="somebody else put it there"):
        Arena(memory, "cats", "node-0")
    assert list(target.iterdir()) == []


def test_two_agents_never_have_the_same_memory(memory: Path, arena: Arena) -> None:
    with pytest.raises(StateError, match="another agent that is still running"):
        Arena(memory, "cats", "node-0")
    save(arena, 1)
    other = Arena(memory, "cats", "node-1")
    assert other.adopt() == []
    other.close()
    assert steps(arena) == [1]


def test_a_new_agent_adopts_what_a_dead_one_of_its_job_left(memory: Path) -> None:
    dead = Arena(memory, "cats", "node-0")
    save(dead, 1)
    held = save(dead, 2)
    save(dead, 2, key=PartKey("/ckpt", "rank-00003", node=5))
    torn = dead.grant(KEY, SIZE, 3)
    assert isinstance(torn, Path)
    sidecar = Sidecar(held.meta.version, 1)
    write_sidecar(held.path, sidecar)
    die(dead)

    heir = Arena(memory, "cats", "node-0b")
    save(heir, 7, key=PartKey("/elsewhere", "shared"))
    adopted = heir.adopt()
    assert steps(heir) == [2, 2, 1]
    assert {held.key for held in adopted} == {KEY, PartKey("/ckpt", "rank-00003", node=5)}
    newest = next(held for held in adopted if held.key == KEY)
    assert newest.path.is_relative_to(heir.root)
    assert read_sidecar(newest.path) == sidecar
    assert not dead.root.exists()
    save(heir, 3)
    assert 2 in steps(heir)
    heir.close()
    assert list(memory.iterdir()) == []


def test_an_agent_of_the_same_key_finds_its_own_memory_again(memory: Path) -> None:
    dead = Arena(memory, "cats", "node-0")
    save(dead, 1)
    held = save(dead, 2)
    sidecar_path(held.path.with_name("shared.99")).write_bytes(b"a slot that is gone")
    unsealed = dead.grant(KEY, SIZE, 3)
    assert isinstance(unsealed, Path)
    die(dead)
    again = Arena(memory, "cats", "node-0")
    assert steps(again) == [2, 1]
    files = set(again.root.glob("*/*"))
    assert files == {held.path for held in again.holdings()}
    again.close()


def test_jobs_do_not_see_each_other(memory: Path) -> None:
    """The prior art names its segments after ranks: two jobs on a host write into each other's."""
    dead = Arena(memory, "cats", "node-0")
    save(dead, 1)
    die(dead)
    other = Arena(memory, "dogs", "node-0")
    assert other.adopt() == []
    assert other.holdings() == []
    other.close()
    assert dead.root.exists()


def test_what_dead_jobs_left_is_removed_after_a_while(memory: Path) -> None:
    dead, living = Arena(memory, "cats", "node-0"), Arena(memory, "mice", "node-0")
    held = save(dead, 1)
    save(living, 1)
    die(dead)
    sweeper = Arena(memory, "dogs", "node-0")
    assert sweeper.sweep() == [], "it was touched just now"
    for path in (*dead.root.rglob("*"), dead.root):
        os.utime(path, (1, 1))
    for path in living.root.rglob("*"):
        os.utime(path, (1, 1))
    assert sweeper.sweep() == [dead.root]
    assert not held.path.exists()
    assert not dead.root.parent.exists()
    assert steps(living) == [1]
    assert living.holdings()[0].path.exists()
    for arena in (sweeper, living):
        arena.close()


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", ".", "..", "ä", "x" * 300])
def test_any_text_can_name_a_job(memory: Path, name: str) -> None:
    arena = Arena(memory, name, "node-0")
    assert arena.root.parent.parent == memory / f"holdfast-{os.getuid()}"
    arena.close()
    assert safe_name(name) != safe_name(name + "x")
