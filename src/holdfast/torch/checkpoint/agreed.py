# SPDX-License-Identifier: Apache-2.0
"""The layout of a sharded state that all ranks have agreed on, and one rank's files in it."""

from collections.abc import Iterable, Mapping
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from holdfast.model.errors import StateError, UsageError
from holdfast.torch.checkpoint import dcp_image
from holdfast.torch.checkpoint.images import Image, bytes_image
from holdfast.torch.checkpoint.shard_map import (
    Chunk,
    Declaration,
    Layout,
    Path,
    SavedChunk,
    SavedTensor,
    ValueRoom,
    aligned,
    check_map,
    is_worth_storing,
    lay_out,
)
from holdfast.torch.checkpoint.sharded_state import Leaves
from holdfast.torch.checkpoint.state import DEPTH_MAX

MAP_FILE = "shards.json"
EXCHANGE_TIMEOUT = timedelta(minutes=10)


class ChunkMap(Struct, frozen=True):
    """The content of shards.json: every chunk of every rank."""

    world_size: int
    tensors: dict[str, SavedTensor]
    values: dict[str, ValueRoom]
    """The places of values that are no tensors, as torch.save wrote them."""
    paths: dict[str, Path] = {}
    """The place of each name in the nested state; older checkpoints lack it."""


def decode_map(data: bytes | memoryview) -> ChunkMap:
    """The map of a checkpoint. StateError if it is damaged, or points outside its files."""
    try:
        found = msgspec.json.decode(data, type=ChunkMap)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"{MAP_FILE} cannot be read: {error}") from error
    check_map(found.tensors, found.world_size)
    for name, room in found.values.items():
        if room.offset < 0 or room.length < 0 or not 0 <= room.rank < found.world_size:
            raise StateError(f"{MAP_FILE} has {name!a} at byte {room.offset} of rank {room.rank}")
    if any(len(path) > DEPTH_MAX for path in found.paths.values()):
        raise StateError(f"{MAP_FILE} has a state that is nested too deep")
    return found


class Exchange:
    """Lets all ranks exchange messages, over a process group of its own."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._group: dist.ProcessGroup | None = None

    def all(self, data: bytes) -> list[bytes]:
        """The messages of all ranks, by rank. Collective."""
        if self.world_size == 1:
            return [data]
        if not dist.is_initialized():
            raise UsageError(
                f"A sharded state of {self.world_size} ranks is saved before "
                "torch.distributed.init_process_group() was called."
            )
        if self._group is None:
            # The training's group may only handle the accelerator's memory, and may be busy.
            self._group = dist.new_group(backend="gloo", timeout=EXCHANGE_TIMEOUT)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
        longest = int(max(sizes))
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, group=self._group)
        return [
            part[: int(size)].numpy().tobytes() for part, size in zip(gathered, sizes, strict=True)
        ]


class AgreedLayout:
    """What all ranks have agreed on for one layout, and this rank's files in it."""

    def __init__(
        self, rank: int, leaves: Leaves, saved: Mapping[str, bytes], exchange: Exchange
    ) -> None:
        """Collective. `saved`: each value as torch.save writes it."""
        self._rank = rank
        self._chunks = leaves.chunks
        declaration = Declaration(
            leaves.chunks,
            {name: dcp_image.room_for(len(data)) for name, data in saved.items()},
            leaves.paths,
        )
        said = exchange.all(msgspec.msgpack.encode(declaration))
        declarations = [msgspec.msgpack.decode(data, type=Declaration) for data in said]
        self._names = leaves.values.keys()
        self._layout = lay_out(declarations, dcp_image.blob_of)
        self._rooms = dict(self._layout.values)
        self._index_files: list[Image] = []
        tensors = self._layout.tensors()
        self._map = ChunkMap(exchange.world_size, tensors, self._rooms, self._layout.paths)
        index = _own_chunks(rank, leaves.chunks, self._layout, tensors)
        self.own_chunks = msgspec.Raw(msgspec.json.encode(index))
        self.own_paths = msgspec.Raw(msgspec.json.encode(leaves.paths))
        place = {chunk: number for number, chunk in enumerate(leaves.chunks)}
        self._order = [place[item.chunk] for item in self._layout.items[rank]]
        self._row: dcp_image.TensorRow | None = None
        self._row_of: tuple[torch.Tensor, ...] = ()

    def fits(self, leaves: Leaves) -> bool:
        """Whether this state has the same layout; every rank gets the same answer."""
        is_same = leaves.chunks is self._chunks or leaves.chunks == self._chunks
        return is_same and leaves.values.keys() == self._names

    def images(self, leaves: Leaves, saved: Mapping[str, bytes]) -> list[Image]:
        """The files of the DCP checkpoint, and the map beside it."""
        if self._row is None or self._row_of is not leaves.tensors:
            tensors = [leaves.tensors[number] for number in self._order]
            early = [leaves.early[number] for number in self._order]
            self._row = dcp_image.tensor_row(self._layout.items[self._rank], tensors, early)
            self._row_of = leaves.tensors
        values = self._values_in_place(saved)
        images = []
        if self._row.holes or values:
            images.append(dcp_image.data_image(self._rank, self._row, values))
        if self._rank == 0:
            if not self._index_files:
                metadata = dcp_image.metadata_file(self._layout, self._rooms)
                self._index_files = [
                    bytes_image(dcp_image.METADATA, metadata),
                    bytes_image(MAP_FILE, msgspec.json.encode(self._map)),
                ]
            images.extend(self._index_files)
        return images

    def _values_in_place(self, saved: Mapping[str, bytes]) -> dict[int, bytes]:
        """The items of the values that this rank stores, by their offsets."""
        mine = {n: saved[n] for n, room in self._rooms.items() if room.rank == self._rank}
        if self._rank == 0 and any(len(data) > self._rooms[n].length for n, data in mine.items()):
            self._make_room(mine)
        return {
            self._rooms[name].offset: dcp_image.padded_value(name, data, self._rooms[name].length)
            for name, data in mine.items()
        }

    def _make_room(self, saved: Mapping[str, bytes]) -> None:
        """Enlarge rank 0's rooms. Rank 0 needs no agreement for this: its values are at the end of
        its file, and only its own map and `.metadata` list them."""
        end = min(self._rooms[name].offset for name in saved)
        for name, data in saved.items():
            room = dcp_image.room_for(len(data))
            self._rooms[name] = ValueRoom(0, end, room)
            end = aligned(end + room)
        self._index_files = []


def _own_chunks(
    rank: int, chunks: Iterable[Chunk], layout: Layout, tensors: Mapping[str, SavedTensor]
) -> dict[str, SavedTensor]:
    """Where each chunk that this rank holds is stored: in its own file, if that has a copy."""
    own = {item.chunk: item.data for item in layout.items[rank]}
    found: dict[str, SavedTensor] = {}
    for chunk in filter(is_worth_storing, chunks):
        if chunk in own:
            place = SavedChunk(rank, own[chunk], chunk.offsets, chunk.sizes)
        else:
            place = next(p for p in tensors[chunk.name].chunks if p.offsets == chunk.offsets)
        before = found[chunk.name].chunks if chunk.name in found else ()
        found[chunk.name] = SavedTensor(chunk.dtype, chunk.shape, (*before, place))
    return found
