# SPDX-License-Identifier: Apache-2.0
"""Parity: any one node of a group can be lost, for groups and parts of any size.

The prior art's replica groups work only from rank 0 on, refer to ranks outside the world when the
group size does not divide the number of nodes, and check neither step nor bytes.
"""

import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.parity import (
    BlockBuilder,
    StripeReceiver,
    rebuild,
    stripe_range,
    xor_into,
)
from holdfast.checkpoint.peer_server import SlotReader
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version, rank_part
from holdfast.model.errors import RejectedError, StateError
from holdfast.model.parity import ABSENT, Block, blocks_of, rebuildable, stripe_for
from holdfast.protocol.checkpoints import PartPut

DIRECTORY = "/checkpoints"
VERSION = Version(3, 2**24 + 1)
SHAPE = Shape(world_size=64, shared=False)


class Slots:
    """Makes slots in a folder of its own and closes them in the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[Slot] = []

    def room(self, size: int) -> Slot:
        slot = Slot.create(self._folder / str(len(self._open)), size)
        # What a slot held before must not matter.
        slot.data[:] = b"\xa5" * len(slot.data)
        self._open.append(slot)
        return slot

    def part(self, name: str, contents: Sequence[bytes]) -> SlotReader:
        """A sealed part with files of these contents."""
        files, length = lay_out((f"file-{i}", len(c)) for i, c in enumerate(contents))
        slot = self.room(length)
        slot.begin(VERSION)
        for file, content in zip(files, contents, strict=True):
            slot.data[file.offset : file.offset + file.length] = content
        slot.seal(SlotMeta(DIRECTORY, name, VERSION, SHAPE, files))
        return reader(slot)

    @property
    def newest(self) -> Slot:
        return self._open[-1]

    def close(self) -> None:
        for slot in self._open:
            slot.close()


def reader(slot: Slot) -> SlotReader:
    meta = slot.read()
    assert meta is not None
    with slot.data[: meta.data_length] as data:
        return SlotReader(slot, meta, digest_of(data))


def image(part: SlotReader) -> bytes:
    return bytes(part.slot.data[: part.offer.total])


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    slots = Slots(tmp_path)
    yield slots
    slots.close()


def announcement(part: SlotReader, block: Block) -> tuple[PartPut, bytes]:
    """What a member sends for a block, and the stripe itself."""
    offer = part.offer
    stripe = block.stripe_of(offer.holding.part)
    begin, end = stripe_range(offer.total, len(block.ranks), stripe)
    content = image(part)[begin:end]
    put = PartPut(
        DIRECTORY,
        1,
        offer.holding,
        offer.total,
        offer.meta_digest,
        block.name,
        digest_of(content),
    )
    return put, content


def feed(receiver: StripeReceiver, content: bytes) -> None:
    while receiver.received < receiver.size:
        with receiver.buffer() as buffer:
            count = len(buffer)
            buffer[:] = content[receiver.received : receiver.received + count]
        receiver.filled(count)


def build(block: Block, parts: dict[str, SlotReader], slots: Slots) -> SlotReader | None:
    """The sealed block; None if nobody contributes to it."""
    builder: BlockBuilder | None = None
    for name in block.contributors():
        put, content = announcement(parts[name], block)
        builder = builder or BlockBuilder(block, put, slots.room)
        assert not builder.is_sealed
        receiver = builder.receiver(put)
        feed(receiver, content)
        receiver.finish()
    if builder is None:
        return None
    assert builder.is_sealed
    assert builder.slot is not None
    return reader(builder.slot)


@dataclass
class Group:
    """All parts and blocks of one group of nodes."""

    members: list[list[int]]
    parts: dict[str, SlotReader]
    blocks: dict[str, SlotReader]

    @classmethod
    def make(cls, contents: Sequence[Sequence[Sequence[bytes]]], slots: Slots) -> "Group":
        """`contents` has, for every node and each of its ranks, the files of the rank's part."""
        members: list[list[int]] = []
        parts: dict[str, SlotReader] = {}
        for node in contents:
            members.append(list(range(len(parts), len(parts) + len(node))))
            for files in node:
                name = rank_part(len(parts))
                parts[name] = slots.part(name, files)
        blocks = {}
        for ranks in blocks_of(members):
            for keeper in range(len(members)):
                block = Block(keeper, ranks)
                built = build(block, parts, slots)
                if built is not None:
                    blocks[block.name] = built
        return cls(members, parts, blocks)

    def without(self, *nodes: int) -> "Group":
        """What is left when these nodes are gone."""
        gone = {rank_part(rank) for node in nodes for rank in self.members[node]}
        keepers = {name: Block.parse(name) for name in self.blocks}
        return Group(
            self.members,
            {name: part for name, part in self.parts.items() if name not in gone},
            {
                name: self.blocks[name]
                for name, block in keepers.items()
                if block is not None and block.keeper not in nodes
            },
        )

    def readers(self, names: Sequence[str]) -> dict[str, SlotReader]:
        return {name: {**self.parts, **self.blocks}[name] for name in names}

    def rebuildable(self) -> dict[str, tuple[str, ...]]:
        return rebuildable(self.parts.keys(), self.blocks)


def some_bytes(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def uneven(nodes: int, ranks: Sequence[int]) -> list[list[list[bytes]]]:
    """Parts of very different sizes, one of them with no data at all."""
    sizes = [300_000, 1, 0, 4096, 70_000, 4097]
    return [
        [
            [some_bytes(node * 100 + n, sizes[(node + n) % len(sizes)]), some_bytes(n, n * 1000)]
            for n in range(ranks[node % len(ranks)])
        ]
        for node in range(nodes)
    ]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 6, 7])
def test_any_one_node_of_a_group_can_be_lost(nodes: int, slots: Slots) -> None:
    group = Group.make(uneven(nodes, ranks=[2, 1, 3]), slots)
    for lost in range(nodes):
        left = group.without(lost)
        found = left.rebuildable()
        assert found.keys() == {rank_part(rank) for rank in group.members[lost]}
        for part, needed in found.items():
            rebuild(part, left.readers(needed), slots.room)
            assert image(reader(slots.newest)) == image(group.parts[part])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40_000), min_size=1, max_size=3), min_size=2, max_size=6),
    st.integers(0, 2**32),
)
def test_whatever_the_sizes_a_lost_part_comes_back_bit_for_bit(
    sizes: list[list[int]], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        slots = Slots(Path(folder))
        rng = random.Random(seed)
        try:
            contents = [[[rng.randbytes(size)] for size in node] for node in sizes]
            group = Group.make(contents, slots)
            lost = rng.randrange(len(sizes))
            left = group.without(lost)
            for part, needed in left.rebuildable().items():
                rebuild(part, left.readers(needed), slots.room)
                assert image(reader(slots.newest)) == image(group.parts[part])
        finally:
            slots.close()


def test_two_lost_nodes_are_too_many(slots: Slots) -> None:
    group = Group.make(uneven(4, ranks=[1]), slots)
    assert group.without(0, 2).rebuildable() == {}
    # A missing block is as bad as a missing part: the lost part's stripe was in it.
    left = group.without(1)
    some_block = next(iter(left.blocks))
    del left.blocks[some_block]
    assert left.rebuildable() == {}


def test_a_part_that_is_still_there_is_not_rebuilt(slots: Slots) -> None:
    assert Group.make(uneven(3, ranks=[1]), slots).rebuildable() == {}


def test_the_memory_of_a_group_is_a_share_and_not_a_copy(slots: Slots) -> None:
    size = 12 * 2**20
    group = Group.make([[[some_bytes(node, size)]] for node in range(5)], slots)
    for block in group.blocks.values():
        assert block.offer.holding.length <= size // 4 + 64 * 1024


def test_a_changed_byte_anywhere_is_found_and_nothing_is_sealed(slots: Slots) -> None:
    """Prior art: a replica is restored without any check of its bytes."""
    group = Group.make([[[some_bytes(node, 50_000)]] for node in range(3)], slots)
    left = group.without(1)
    (needed,) = left.rebuildable().values()
    for name, source in left.readers(needed).items():
        for position in (5_000, 40_000):  # One in each stripe: of a part one is not needed.
            source.slot.data[position] ^= 1
        with pytest.raises(StateError, match=r"rank-00001 of step 16777217 came damaged"):
            rebuild(rank_part(1), left.readers(needed), slots.room)
        assert slots.newest.read() is None, name
        for position in (5_000, 40_000):
            source.slot.data[position] ^= 1
    rebuild(rank_part(1), left.readers(needed), slots.room)
    assert slots.newest.read() is not None


def test_a_stripe_that_breaks_off_goes_on_where_it_stopped(slots: Slots) -> None:
    part = slots.part(rank_part(0), [some_bytes(1, 9 * 2**20)])
    block = Block(1, (0, 1))
    put, content = announcement(part, block)
    builder = BlockBuilder(block, put, slots.room)
    first = builder.receiver(put)
    with first.buffer() as buffer:
        count = len(buffer)
        buffer[:] = content[:count]
    first.filled(count)
    again = builder.receiver(put)
    assert again.received == count
    feed(again, content)
    again.finish()
    assert builder.is_sealed
    assert builder.slot is not None
    assert bytes(builder.slot.file("block")[: len(content)]) == content


def test_a_damaged_stripe_spoils_the_block(slots: Slots) -> None:
    parts = [slots.part(rank_part(rank), [some_bytes(rank, 10_000)]) for rank in range(3)]
    block = Block(2, (0, 1, 2))
    put, content = announcement(parts[0], block)
    builder = BlockBuilder(block, put, slots.room)
    receiver = builder.receiver(put)
    feed(receiver, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StateError, match="the stripe of rank-00000 came damaged"):
        receiver.finish()
    with pytest.raises(RejectedError, match="cannot be finished: the stripe of rank-00000"):
        builder.receiver(announcement(parts[1], block)[0])
    assert not builder.is_sealed


def test_a_stripe_for_which_there_is_no_room_can_come_again(slots: Slots) -> None:
    part = slots.part(rank_part(0), [some_bytes(1, 10_000)])
    block = Block(1, (0, 1))
    put, content = announcement(part, block)
    is_full = True

    def room(size: int) -> Slot:
        if is_full:
            raise RejectedError("no room")
        return slots.room(size)

    builder = BlockBuilder(block, put, room)
    with pytest.raises(RejectedError, match="no room"):
        builder.receiver(put)
    is_full = False
    receiver = builder.receiver(put)
    feed(receiver, content)
    receiver.finish()
    assert builder.is_sealed


def test_parts_that_do_not_belong_to_a_block_are_refused(slots: Slots) -> None:
    part = slots.part(rank_part(0), [b"x"])
    block = Block(1, (0, 1))
    put, _ = announcement(part, block)
    builder = BlockBuilder(block, put, slots.room)
    other = slots.part(rank_part(7), [b"x"]).offer
    with pytest.raises(RejectedError, match="rank-00007 cannot be added"):
        builder.receiver(PartPut(DIRECTORY, 1, other.holding, other.total, 1, block.name, 1))
    with pytest.raises(RejectedError, match="cannot be added to the parity block of step"):
        builder.receiver(PartPut("/elsewhere", 1, put.holding, put.total, 1, block.name, 1))


@pytest.mark.parametrize("size", [2, 3, 5, 6, 17])
def test_every_stripe_has_one_keeper(size: int) -> None:
    for member in range(size):
        stripes = [stripe_for(member, keeper, size) for keeper in range(size) if keeper != member]
        assert sorted(stripes) == list(range(size - 1))
    with pytest.raises(ValueError, match="gives nothing"):
        stripe_for(1, 1, size)


@given(st.integers(0, 2**45), st.integers(2, 40))
def test_stripes_cover_an_image_of_any_size_once(total: int, members: int) -> None:
    """Also above 4 GiB, where 32 bits end."""
    ranges = [stripe_range(total, members, stripe) for stripe in range(members - 1)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        assert end == begin
    longest = ranges[0][1] - ranges[0][0]
    assert all(end - begin <= longest for begin, end in ranges)
    assert longest <= total // (members - 1) + 4096


@given(st.lists(st.one_of(st.just(ABSENT), st.integers(0, 10**6)), min_size=2, max_size=12))
def test_the_name_of_a_block_says_everything(ranks: list[int]) -> None:
    for keeper in range(len(ranks)):
        block = Block(keeper, tuple(ranks))
        assert Block.parse(block.name) == block


@pytest.mark.parametrize(
    "name",
    ["", "shared", "rank-00001", "parity-", "parity-0-of-1", "parity-2-of-0_1", "parity-x-of-0_1",
     "parity-0-of-0_", "parity-0-of-0_-1", "parity--1-of-0_1", "parity-0-of-0_1²"],
)  # fmt: skip
def test_what_is_not_the_name_of_a_block(name: str) -> None:
    assert Block.parse(name) is None


@given(st.binary(max_size=5000), st.integers(0, 2**32))
def test_xor_twice_gives_back_what_was(content: bytes, seed: int) -> None:
    other = some_bytes(seed, len(content))
    target = bytearray(content)
    xor_into(memoryview(target), other)
    assert target == bytes(a ^ b for a, b in zip(content, other, strict=True))
    xor_into(memoryview(target), other)
    assert target == content


def test_the_agent_needs_no_numpy() -> None:
    """Without it the sums are the same, only slower."""
    script = """
import sys
sys.modules["numpy"] = None
from holdfast.checkpoint.parity import xor_into
target = bytearray(b"\\x0f\\xf0\\xff\\x00")
xor_into(memoryview(target), b"\\xff\\xff\\xff\\x00")
assert target == b"\\xf0\\x0f\\x00\\x00", target
"""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.defpath}
    command = [sys.executable, "-c", script]
    subprocess.run(command, check=True, timeout=120, env=environment)
