# SPDX-License-Identifier: Apache-2.0
"""Slots in memory and, when that has no room, on disk: who gets which, and what becomes of them."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.agent.vault.arenas import Arenas
from holdfast.checkpoint.arena import Arena, PartKey
from holdfast.checkpoint.roots import user_dir
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version
from holdfast.model.errors import RejectedError, StateError
from tests.disks import small_disk
from tests.hearing import Heard

MIB = 1024 * 1024
SIZE = 3 * MIB
KEY = PartKey("/ckpt", "shared")
ON_DISK = "holdfast-slots"


@dataclass
class Places:
    """A memory of 4 MiB, a disk, and the agents that have their slots there."""

    memory: Path
    disk: Path
    said: Heard = field(default_factory=Heard)
    made: list[Arena] = field(default_factory=list)

    def agent(self, key: str = "a") -> Arenas:
        def make(place: Path, name: str) -> Arena:
            arena = Arena(place, "cats", key, name)
            self.made.append(arena)
            return arena

        return Arenas(
            lambda: make(self.memory, "holdfast"),
            lambda: make(self.disk, ON_DISK),
            lambda: any(self.disk.iterdir()),
            self.said,
        )


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(tmp_path / "memory", "size=4m") as memory:
        yield Places(memory, disk)


def granted(arenas: Arenas, *, on_disk: bool) -> Path:
    path = arenas.grant(KEY, SIZE, 2, frozenset(), on_disk=on_disk)
    assert isinstance(path, Path)
    return path


def save(arenas: Arenas, step: int, *, on_disk: bool) -> Path:
    path = granted(arenas, on_disk=on_disk)
    version = Version(1, step)
    files, _ = lay_out([("f", SIZE)])
    with Slot.open(path, writable=True) as slot:
        slot.begin(version)
        slot.data[:SIZE] = bytes([step]) * SIZE
        slot.seal(SlotMeta(KEY.directory, KEY.part, version, Shape(1, True), files))
    arenas.of(path).sealed(path)
    return path


def steps(arenas: Arenas) -> list[int]:
    return [held.meta.version.step for held in arenas.holdings("/ckpt")]


def test_memory_first_and_the_disk_only_for_what_may_go_there(places: Places) -> None:
    arenas = places.agent()
    first = save(arenas, 1, on_disk=True)
    assert first.is_relative_to(places.memory)
    assert not any(places.disk.iterdir())
    with pytest.raises(RejectedError, match=r"no room for part shared: .* can be had"):
        granted(arenas, on_disk=False)
    second, third = save(arenas, 2, on_disk=True), save(arenas, 3, on_disk=True)
    assert [arenas.is_on_disk(path) for path in (first, second, third)] == [False, True, True]
    assert steps(arenas) == [3, 2, 1]
    assert len([line for line in places.said if "which is slower" in line]) == 1
    arenas.close()
    assert not any(places.disk.iterdir())
    assert not any(places.memory.iterdir())


def test_the_next_agent_takes_over_what_a_dead_one_left_on_disk(places: Places) -> None:
    arenas = places.agent()
    save(arenas, 1, on_disk=True)
    save(arenas, 2, on_disk=True)
    kill(places)
    after = places.agent("b")
    assert steps(after) == [2, 1]
    assert "took over what a dead agent left on disk, up to step 2" in places.said
    after.close()
    assert not any(places.disk.iterdir())


def kill(places: Places) -> None:
    """What is left when an agent is killed: its slots, and nobody who has their locks."""
    for arena in places.made:
        aside = arena.root.with_name("aside")
        arena.root.rename(aside)
        arena.close()
        aside.rename(arena.root)


def test_a_memory_that_cannot_be_made_is_an_empty_one_until_it_can(places: Places) -> None:
    in_the_way = user_dir(places.memory)
    in_the_way.touch()
    arenas = places.agent()
    assert arenas.holdings("/ckpt") == []
    assert arenas.holdings("/ckpt") == []
    assert len(places.said) == 1
    assert places.said[0].startswith("no checkpoint can be kept in memory: ")
    with pytest.raises(RejectedError, match="no checkpoint can be kept in memory: "):
        arenas.reserve(KEY, SIZE, 1)
    with pytest.raises(StateError, match="there is no memory slot"):
        arenas.of(places.memory / "slot.1")
    assert save(arenas, 1, on_disk=True).is_relative_to(places.disk)
    in_the_way.unlink()
    assert save(arenas, 2, on_disk=False).is_relative_to(places.memory)
    assert steps(arenas) == [2, 1]
    arenas.close()


def test_without_a_disk_there_is_one_sentence_about_both(places: Places) -> None:
    arenas = places.agent()
    save(arenas, 1, on_disk=True)
    shutil.rmtree(places.disk)
    with pytest.raises(
        RejectedError,
        match=r"no room for part .*; nor is there any on disk: no checkpoint can be kept on disk",
    ):
        granted(arenas, on_disk=True)
    assert steps(arenas) == [1]
    arenas.close()


def test_what_others_remove_from_memory_is_said_once_and_saves_go_on_there(places: Places) -> None:
    arenas = places.agent()
    save(arenas, 1, on_disk=False)
    for step in (2, 3):
        shutil.rmtree(places.made[0].root)
        assert steps(arenas) == []
        assert save(arenas, step, on_disk=True).is_relative_to(places.memory)
        assert steps(arenas) == [step]
    assert len(places.said) == 1
    assert places.said[0].startswith("checkpoints in memory were removed by another program from")
    arenas.close()
    assert not any(places.memory.iterdir())


def test_without_its_folder_memory_has_no_room(places: Places) -> None:
    places.memory = places.memory / "folder"
    places.memory.mkdir()
    arenas = places.agent()
    save(arenas, 1, on_disk=False)
    shutil.rmtree(places.memory)
    with pytest.raises(RejectedError, match=r"could not be set aside in .*: No such file"):
        granted(arenas, on_disk=False)
    assert save(arenas, 2, on_disk=True).is_relative_to(places.disk)
    assert steps(arenas) == [2]
    arenas.close()
