# SPDX-License-Identifier: Apache-2.0
"""What a starting worker maps before its program asks for it."""

import os
from pathlib import Path

import pytest

from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version
from holdfast.torch.checkpoint.mappings import MappedSlots
from holdfast.torch.checkpoint.staging import HostStager
from holdfast.worker import ahead
from tests.waiting import until

LIMIT_S = 60.0
VERSION = Version(0, 7)


def sealed(path: Path) -> str:
    files, length = lay_out([("state.bin", 100_000)])
    with Slot.create(path, length) as slot:
        slot.begin(VERSION)
        slot.data[:5] = b"hello"
        slot.seal(SlotMeta("/saves", "rank-0", VERSION, Shape(1, shared=False), files))
    return str(path)


def is_mapped(path: str) -> bool:
    return path in Path("/proc/self/maps").read_text()


def test_a_slot_that_was_mapped_ahead_is_not_mapped_again(tmp_path: Path) -> None:
    path = sealed(tmp_path / "slot")
    ahead.begin([path])
    until(lambda: is_mapped(path), LIMIT_S, "the slot is mapped")
    slots = MappedSlots(HostStager())
    slot = slots.get(path)
    meta = slot.read()
    assert meta is not None
    assert meta.version == VERSION
    assert bytes(slot.file("state.bin")[:5]) == b"hello"
    assert Path("/proc/self/maps").read_text().count(path) == 1
    slots.close()
    assert not is_mapped(path)


def test_what_has_changed_or_gone_meanwhile_is_not_taken_for_what_is_there(tmp_path: Path) -> None:
    path, gone = sealed(tmp_path / "slot"), sealed(tmp_path / "gone")
    ahead.begin([path, gone])
    until(lambda: is_mapped(path) and is_mapped(gone), LIMIT_S, "the slots are mapped")
    os.unlink(gone)
    os.rename(sealed(tmp_path / "other"), path)
    slots = MappedSlots(HostStager())
    with slots.get(path) as slot:
        assert os.stat(path).st_ino == os.stat(slot.path).st_ino
        slot.begin(Version(0, 8))
        with Slot.open(path, writable=False) as now:
            assert now.read() is None  # It is the new file that was written to.
    # Memory without a name is given back with the next look at any slot.
    assert not is_mapped(gone)


@pytest.mark.parametrize("content", [None, b""])
def test_a_file_that_cannot_be_mapped_disturbs_nobody(
    tmp_path: Path, content: bytes | None
) -> None:
    bad, good = tmp_path / "bad", sealed(tmp_path / "good")
    if content is not None:
        bad.write_bytes(content)
    ahead.begin([str(bad), good])
    until(lambda: is_mapped(good), LIMIT_S, "the other slot is mapped")
    assert set(ahead.take()) == {good}
    assert ahead.take() == {}


def test_slots_count_as_untouched_until_all_their_memory_was_used(tmp_path: Path) -> None:
    """A save then goes elsewhere if it can: the first touch of memory takes seconds."""
    paths = [sealed(tmp_path / name) for name in ("one", "two")]
    slots = MappedSlots(HostStager())
    slots.pause()
    slots.touch(paths)
    assert slots.untouched() == tuple(paths)
    slots.go_on()
    until(lambda: slots.untouched() == (), LIMIT_S, "both slots were touched")
    slots.close()
