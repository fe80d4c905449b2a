# SPDX-License-Identifier: Apache-2.0
"""Lays a rank's file out as torch.distributed.checkpoint does: `__3_0.distcp` and `.metadata`.

A `.distcp` file is a row of items, each of them a small torch.save file: one per tensor chunk, and
one per value that is no tensor. `.metadata` says where each item is. Both are written for other
programs: `dcp.load` reads them without Holdfast, at any world size. Holdfast itself reads by its
JSON indexes and never unpickles anything.

Items of tensors come first and stay in place from save to save. Values come last, each in a room
with some space left, because their length may change a little.
"""

import functools
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint.images import Hole, Image, dtype_named
from holdfast.torch.checkpoint.shard_map import Blob, Item, Layout, Lengths, ValueRoom
from holdfast.torch.checkpoint.zip_image import zip_image

METADATA = ".metadata"
_ROOM_STEP = 1024
_COMMENT_MAX = 0xFFFF
"""A zip archive ends with a comment of at most this length: the only padding it has room for."""


def data_file(rank: int) -> str:
    """The name that torch gives to the one data file of a rank."""
    return f"__{rank}_0.distcp"


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """A torch.save file of one tensor without the tensor's bytes."""

    head: bytes
    tail: bytes
    size: int
    """The length of the bytes between the two."""


@functools.lru_cache(maxsize=4096)
def _skeleton(dtype: str, sizes: Lengths) -> _Skeleton:
    # Memory that is not touched takes no space, so this costs nothing even for a large tensor.
    image = zip_image("", torch.empty(sizes, dtype=dtype_named(dtype)))
    if not image.holes:
        return _Skeleton(b"".join(data for _, data in image.pieces), b"", 0)
    (hole,) = image.holes
    head = b"".join(data for offset, data in image.pieces if offset < hole.offset)
    tail = b"".join(data for offset, data in image.pieces if offset > hole.offset)
    return _Skeleton(head, tail, hole.tensor.nbytes)


@functools.lru_cache(maxsize=4096)
def blob_of(dtype: str, sizes: Lengths) -> Blob:
    """The length of a tensor's item, and the place of the tensor's bytes in it."""
    skeleton = _skeleton(dtype, sizes)
    return Blob(len(skeleton.head) + skeleton.size + len(skeleton.tail), len(skeleton.head))


def saved_value(value: object) -> bytes:
    """The item of a value that is no tensor."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def room_for(length: int) -> int:
    """The room for a value of this length, with space to grow."""
    padding = min(max(length, _ROOM_STEP), _COMMENT_MAX - _ROOM_STEP)
    return -(-(length + padding) // _ROOM_STEP) * _ROOM_STEP


def padded_value(name: str, saved: bytes, room: int) -> bytes:
    """The item stretched to its room; it still is a file that torch.load reads."""
    padding = room - len(saved)
    if not 0 <= padding <= _COMMENT_MAX:
        raise UsageError(
            f"{name} takes {len(saved)} bytes now and does not fit its {room} bytes any more; "
            "a value that changes its size that much must be the same on rank 0."
        )
    # The last two bytes of a zip archive are the length of the comment that follows.
    return saved[:-2] + padding.to_bytes(2, "little") + bytes(padding)


@dataclass(frozen=True, slots=True)
class TensorRow:
    """The first items of a rank's file: those of its tensors."""

    pieces: tuple[tuple[int, bytes], ...]
    holes: tuple[Hole, ...]
    tail: bytes
    """The bytes after the last hole."""
    end: int


def tensor_row(
    items: Sequence[Item], tensors: Sequence[torch.Tensor], early: Sequence[bool]
) -> TensorRow:
    """Lay the items of tensors out: `tensors[i]` goes into `items[i]`."""
    pieces: list[tuple[int, bytes]] = []
    holes: list[Hole] = []
    row = b""  # Bytes that follow each other and end at `end`.
    end = 0
    for item, tensor, is_early in zip(items, tensors, early, strict=True):
        skeleton = _skeleton(item.chunk.dtype, item.chunk.sizes)
        row = b"".join((row, bytes(item.offset - end), skeleton.head))
        pieces.append((item.data - len(row), row))
        holes.append(Hole(item.data, tensor, item.chunk.name, is_early))
        row = skeleton.tail
        end = item.offset + item.length
    return TensorRow(tuple(pieces), tuple(holes), row, end)


def data_image(rank: int, row: TensorRow, values: Mapping[int, bytes]) -> Image:
    """The file of one rank: its tensors, and `values` by where they begin."""
    rest, end = bytearray(row.tail), row.end
    for offset, saved in sorted(values.items()):
        rest += bytes(offset - end)
        rest += saved
        end = offset + len(saved)
    pieces = row.pieces
    if rest:
        pieces = (*pieces, (end - len(rest), bytes(rest)))
    return Image(data_file(rank), end, pieces, row.holes)


def metadata_file(layout: Layout, rooms: Mapping[str, ValueRoom]) -> bytes:
    """The content of `.metadata`, written by torch itself."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results: list[WriteResult] = []
    for rank, items in enumerate(layout.items):
        for item in items:
            if item.listed:
                index = _add_chunk(found, item)
                place = _StorageInfo(data_file(rank), item.offset, item.length)
                results.append(WriteResult(index, item.length, place))
    for name, room in rooms.items():
        found[name] = BytesStorageMetadata()
        place = _StorageInfo(data_file(room.rank), room.offset, room.length)
        results.append(WriteResult(MetadataIndex(name), room.length, place))
    metadata = Metadata(found, planner_data=dict(layout.paths))
    # torch writes only to a file. The file is small, and written again only when it changes.
    with tempfile.TemporaryDirectory() as folder:
        _MetadataWriter(folder, sync_files=False).finish(metadata, [results])
        return (Path(folder) / METADATA).read_bytes()


def _add_chunk(
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata], item: Item
) -> MetadataIndex:
    chunk = item.chunk
    tensor = found.get(chunk.name)
    if not isinstance(tensor, TensorStorageMetadata):
        properties = TensorProperties(dtype=dtype_named(chunk.dtype))
        tensor = TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
        found[chunk.name] = tensor
    offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
    tensor.chunks.append(ChunkStorageMetadata(offsets, sizes))
    return MetadataIndex(chunk.name, offsets, len(tensor.chunks) - 1)


class _MetadataWriter(FileSystemWriter):
    """Writes no path of this machine into `.metadata`."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()
