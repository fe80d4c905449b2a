# SPDX-License-Identifier: Apache-2.0
"""Memory that changes after the vault has verified it: no process goes on with such bytes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.checkpoint.digests import read_sidecar
from holdfast.checkpoint.slots import Slot
from holdfast.model.errors import StateError
from holdfast.runtime.settings import memory_dir
from holdfast.torch import MEMORY, STORAGE, Checkpointer
from tests.waiting import until

WAIT_S = 120.0


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path / "saves") as made:
        yield made


class Victim(nn.Module):
    """Something happens when its state is looked at for the first time: a load does so when the
    parts are open and before it takes their bytes."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((50_000,), value))
        self.turned = nn.Parameter(torch.full((3, 7), value).t())
        self.strikes: list[Callable[[], None]] = []
        self.register_state_dict_pre_hook(self._strike)

    def _strike(self, *_: object) -> None:
        while self.strikes:
            self.strikes.pop()()

    def holds(self, value: float) -> bool:
        return bool((self.weight == value).all() and (self.turned == value).all())


def slot_of(directory: str, part: str, step: int) -> Path:
    """The slot with this part of a step, once its digest is beside it."""
    found = until(lambda: _digested(directory, part, step), WAIT_S)
    assert found is not None
    return found


def _digested(directory: str, part: str, step: int) -> Path | None:
    for path in memory_dir().rglob(f"{part}.*"):
        sidecar = None if ".crc" in path.name else read_sidecar(path)
        if sidecar is not None and sidecar.version.step == step:
            with Slot.open(path, writable=False) as slot:
                meta = slot.read()
            if meta is not None and meta.directory == directory:
                return path
    return None


def flip(path: Path, name: str, offset: int) -> None:
    """Change one bit of a file in a slot; counted from its end if the offset is below 0."""
    with Slot.open(path, writable=True) as slot:
        meta = slot.read()
        assert meta is not None
        file = next(file for file in meta.files if file.name == name)
        slot.data[file.offset + (offset if offset >= 0 else file.length + offset)] ^= 1


PLACES = [
    ("shared.safetensors", -1),  # A tensor that lies in a row, or one that torch copies.
    ("shared.safetensors", -60_000),
    ("shared.json", 20),  # The index: what it says may make no sense any more.
    ("shared.json", -30),
    ("shared.json", -3),
]


@pytest.mark.parametrize(("name", "offset"), PLACES)
def test_a_load_takes_an_older_step_when_the_newest_changes_under_it(
    checkpointer: Checkpointer, name: str, offset: int
) -> None:
    for step in (1, 2):
        assert checkpointer.save(step, Victim(float(step)), to=MEMORY).taken
    path = slot_of(checkpointer.series.directory, "shared", 2)
    model = Victim(0.0)
    model.strikes.append(lambda: flip(path, name, offset))
    assert checkpointer.load(model) == 1
    assert not model.strikes
    assert model.holds(1.0)


def test_it_does_so_too_when_the_newest_came_without_a_digest(checkpointer: Checkpointer) -> None:
    """torch has copied a tensor of it: the agent computes the digest later, or for this load."""
    for step in (1, 2):
        assert checkpointer.save(step, Victim(float(step)), to=MEMORY).taken
    model = Victim(0.0)
    model.strikes.append(
        lambda: flip(slot_of(checkpointer.series.directory, "shared", 2), *PLACES[0])
    )
    assert checkpointer.load(model) == 1
    assert model.holds(1.0)


def test_it_takes_the_copy_on_storage_if_there_is_one(checkpointer: Checkpointer) -> None:
    assert checkpointer.save(1, Victim(1.0), to=STORAGE).taken
    assert checkpointer.wait(WAIT_S) == 1
    path = slot_of(checkpointer.series.directory, "shared", 1)
    model = Victim(0.0)
    model.strikes.append(lambda: flip(path, *PLACES[0]))
    assert checkpointer.load(model) == 1
    assert model.holds(1.0)
    assert not path.exists()


def test_a_process_whose_model_has_wrong_bytes_and_no_other_copy_has_to_start_again(
    checkpointer: Checkpointer,
) -> None:
    assert checkpointer.save(1, Victim(1.0), to=MEMORY).taken
    path = slot_of(checkpointer.series.directory, "shared", 1)
    model = Victim(0.0)
    model.strikes.append(lambda: flip(path, *PLACES[0]))
    with pytest.raises(StateError, match="this process has to start again"):
        checkpointer.load(model)
    other = Victim(0.0)
    assert checkpointer.load(other) is None
    assert other.holds(0.0)


def test_files_that_change_while_a_framework_reads_them_are_not_trained_on(
    checkpointer: Checkpointer,
) -> None:
    for step in (1, 2):
        assert checkpointer.save_files(step, {"state.bin": b"%d" % step * 9000}, to=MEMORY).taken
    found = checkpointer.load_files()
    assert found is not None
    assert found.step == 2
    flip(slot_of(checkpointer.series.directory, "rank-00000", 2), "state.bin", 17)
    with pytest.raises(StateError, match="rank-00000 of step 2 changed in memory"):
        found.close()
    again = checkpointer.load_files()
    assert again is not None
    with again:
        assert again.step == 1
        assert bytes(again.file("state.bin")) == b"1" * 9000


def test_files_that_are_not_used_are_not_looked_at(checkpointer: Checkpointer) -> None:
    assert checkpointer.save_files(1, {"state.bin": bytes(9000)}, to=MEMORY).taken
    found = checkpointer.load_files()
    assert found is not None
    flip(slot_of(checkpointer.series.directory, "rank-00000", 1), "state.bin", 17)
    with pytest.raises(StateError, match="no file other"), found:
        found.file("other")
