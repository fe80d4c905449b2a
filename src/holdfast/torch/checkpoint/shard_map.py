# SPDX-License-Identifier: Apache-2.0
"""Which rank stores which piece of which tensor, and where in its file.

Every rank declares the chunks (boxes of tensors) that it holds. From all declarations each rank
computes the same map. A chunk that several ranks hold is stored by one of them, so that a
replicated tensor costs its bytes once. Small chunks are the exception: every rank stores its own
copy of them, because restoring them must not take another rank's whole part.

This module does not know torch and touches no bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from holdfast.model.errors import StateError, UsageError

ALIGNMENT = 64
"""Every item of a file begins at a multiple of this; torch aligns the data within an item."""
SMALL = 64 * 1024
"""Chunks up to this many bytes are stored by every rank that holds them."""

Lengths = tuple[int, ...]
Path = tuple[str | int, ...]


def aligned(position: int) -> int:
    """The next offset at which an item may begin."""
    return -(-position // ALIGNMENT) * ALIGNMENT


class Chunk(Struct, frozen=True, array_like=True):
    """A box of a tensor: the whole tensor, if it is not sharded."""

    name: str
    """The tensor's name in the whole state: "optimizer.state.layer.weight.exp_avg"."""
    dtype: str
    """Its name in torch: "bfloat16"."""
    shape: Lengths
    """The shape of the whole tensor."""
    offsets: Lengths
    """Where the box begins in the whole tensor."""
    sizes: Lengths


class Declaration(Struct, frozen=True, array_like=True):
    """What one rank holds."""

    chunks: tuple[Chunk, ...]
    values: dict[str, int]
    """Values that are no tensors: the room that each takes in the file."""
    paths: dict[str, Path]
    """The place of each name in the nested state."""


class Blob(Struct, frozen=True, array_like=True):
    """The size of an item with a tensor, and where the tensor's bytes begin in it."""

    length: int
    data: int


BlobOf = Callable[[str, Lengths], Blob]
"""From a dtype and the sizes of a tensor to its blob."""


class Item(Struct, frozen=True, array_like=True):
    """A chunk in a rank's file."""

    chunk: Chunk
    offset: int
    length: int
    data: int
    """Where the chunk's raw bytes begin in the file."""
    listed: bool
    """Whether this copy is the one that the map and `.metadata` list."""


class ValueRoom(Struct, frozen=True, array_like=True):
    """The room of a value that is no tensor."""

    rank: int
    offset: int
    length: int


class SavedChunk(Struct, frozen=True, array_like=True):
    """Where a chunk's raw bytes are."""

    rank: int
    data: int
    offsets: Lengths
    sizes: Lengths


class SavedTensor(Struct, frozen=True, array_like=True):
    """All chunks of a tensor."""

    dtype: str
    shape: Lengths
    chunks: tuple[SavedChunk, ...]


class Layout(Struct, frozen=True):
    """The files of all ranks."""

    items: tuple[tuple[Item, ...], ...]
    """The items per rank, in the order of the file."""
    values: dict[str, ValueRoom]
    paths: dict[str, Path]

    def tensors(self) -> dict[str, SavedTensor]:
        """The map by tensor."""
        found: dict[str, list[SavedChunk]] = {}
        about: dict[str, Chunk] = {}
        for rank, items in enumerate(self.items):
            for item in items:
                if item.listed:
                    chunk = item.chunk
                    about.setdefault(chunk.name, chunk)
                    saved = SavedChunk(rank, item.data, chunk.offsets, chunk.sizes)
                    found.setdefault(chunk.name, []).append(saved)
        return {
            name: SavedTensor(about[name].dtype, about[name].shape, tuple(chunks))
            for name, chunks in found.items()
        }


def check_map(tensors: Mapping[str, SavedTensor], world_size: int) -> None:
    """StateError unless every chunk of a loaded map is a box of its tensor."""
    for name, tensor in tensors.items():
        dims = len(tensor.shape)
        for chunk in tensor.chunks:
            is_box = len(chunk.offsets) == len(chunk.sizes) == dims and all(
                offset >= 0 and size >= 0 and offset + size <= side
                for offset, size, side in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)
            )
            if not is_box or chunk.data < 0 or not 0 <= chunk.rank < world_size:
                raise StateError(
                    f"The index has a chunk of {name!a} of rank {chunk.rank} that cannot be: "
                    f"{list(chunk.sizes)} at {list(chunk.offsets)} of {list(tensor.shape)}."
                )


def is_worth_storing(chunk: Chunk) -> bool:
    """False for an empty box, which an uneven split leaves on its last ranks."""
    return math.prod(chunk.sizes) > 0 or math.prod(chunk.shape) == 0


def lay_out(declarations: Sequence[Declaration], blob_of: BlobOf) -> Layout:
    """Make the layout: the same on every rank, given the declarations in the order of the ranks."""
    writers = _writers(declarations, blob_of)
    items: list[tuple[Item, ...]] = []
    values: dict[str, ValueRoom] = {}
    paths: dict[str, Path] = {}
    for rank, declaration in enumerate(declarations):
        own = tuple(_place(rank, declaration, writers, blob_of))
        items.append(own)
        end = aligned(own[-1].offset + own[-1].length) if own else 0
        for name, length in declaration.values.items():
            # The lowest rank with it stores it: mostly rank 0, which may then change its size.
            if name not in values:
                values[name] = ValueRoom(rank, end, length)
                end = aligned(end + length)
        paths.update(declaration.paths)
    layout = Layout(tuple(items), values, paths)
    _check(layout)
    return layout


def _key(chunk: Chunk) -> tuple[str, Lengths]:
    # All boxes of an empty tensor are equal: they contain nothing.
    is_empty = math.prod(chunk.shape) == 0
    return (chunk.name, (0,) * len(chunk.shape) if is_empty else chunk.offsets)


def _writers(
    declarations: Sequence[Declaration], blob_of: BlobOf
) -> dict[tuple[str, Lengths], int]:
    """The rank whose copy the map lists: of a chunk's holders the one with least to store so far,
    or the lowest if the chunk is small."""
    holders: dict[tuple[str, Lengths], list[int]] = {}
    lengths: dict[tuple[str, Lengths], int] = {}
    for rank, declaration in enumerate(declarations):
        for chunk in declaration.chunks:
            if is_worth_storing(chunk):
                key = _key(chunk)
                holders.setdefault(key, []).append(rank)
                lengths[key] = blob_of(chunk.dtype, chunk.sizes).length
    load = [0] * len(declarations)
    writers: dict[tuple[str, Lengths], int] = {}
    for key, ranks in holders.items():
        length = lengths[key]
        writers[key] = ranks[0] if length <= SMALL else min(ranks, key=load.__getitem__)
        load[writers[key]] += length
    return writers


def _place(
    rank: int,
    declaration: Declaration,
    writers: dict[tuple[str, Lengths], int],
    blob_of: BlobOf,
) -> Iterator[Item]:
    end = 0
    for chunk in declaration.chunks:
        if not is_worth_storing(chunk):
            continue
        blob = blob_of(chunk.dtype, chunk.sizes)
        is_writer = writers[_key(chunk)] == rank
        if is_writer or blob.length <= SMALL:
            yield Item(chunk, end, blob.length, end + blob.data, is_writer)
            end = aligned(end + blob.length)


def _check(layout: Layout) -> None:
    """Check that chunks fill their tensor exactly: otherwise it could not be read back."""
    for name, tensor in layout.tensors().items():
        if name in layout.values:
            raise UsageError(f"{name} is a tensor on one rank and something else on another.")
        volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if volume != math.prod(tensor.shape):
            raise UsageError(
                f"The ranks hold {volume} elements of {name} in {len(tensor.chunks)} different "
                f"chunks, but it has {math.prod(tensor.shape)}: its shards overlap or are missing."
            )
