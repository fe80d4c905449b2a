# SPDX-License-Identifier: Apache-2.0
"""What a node has to be sure of before it reports that its parts are on storage."""

from pathlib import Path, PurePosixPath

import pytest

from holdfast.checkpoint.persist import write_part
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.storage_port import CrcOf, Moved, crc_of
from holdfast.model.checkpoint import SHARED, Series, Version
from holdfast.model.errors import StateError
from tests.storages import fill_slot

V1, V2 = Version(1, 100), Version(1, 101)
FILES = {"a.bin": bytes(5000), "folder/b.bin": b"b" * 70_000, "c.json": b"{}"}


class Watched(PosixStorage):
    """Remembers which names a loss of power could still take."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.unsynced: set[str] = set()
        self.written: list[str] = []

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        self.written.append(path)
        self.unsynced.add(path)
        return super().write(path, data, writers, moved, crc_of)

    def sync(self, path: str) -> None:
        super().sync(path)
        self.unsynced = {
            name for name in self.unsynced if not PurePosixPath(name).is_relative_to(path)
        }


class Overtaken(Watched):
    """A worker begins with its next save while the first file of a slot is written."""

    def __init__(self, directory: str, slot: Slot, number: int) -> None:
        super().__init__(directory)
        self._slot = slot
        self._number = number

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        if len(self.written) == self._number:
            self._slot.begin(V2)
        return super().write(path, data, writers, moved, crc_of)


def test_the_names_of_all_files_are_durable_when_a_part_is_written(tmp_path: Path) -> None:
    """The commit is another node's, and that can only sync what it sees."""
    series = Series(str(tmp_path / "ckpt"))
    storage = Watched(series.directory)
    with fill_slot(tmp_path / "slot", series, V1, SHARED, FILES) as slot:
        write_part(storage, series, "a1", slot)
    assert len(storage.written) == len(FILES)
    assert storage.unsynced == set()


@pytest.mark.parametrize("number", range(len(FILES)))
def test_a_slot_that_is_written_to_meanwhile_is_not_reported(tmp_path: Path, number: int) -> None:
    series = Series(str(tmp_path / "ckpt"))
    with fill_slot(tmp_path / "slot", series, V1, SHARED, FILES) as slot:
        storage = Overtaken(series.directory, slot, number)
        with pytest.raises(StateError, match="was written to while step 100 of it was being"):
            write_part(storage, series, "a1", slot)
