# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which rank's file fill a chunk, and how they are copied.

A chunk that was saved exactly as it is needed is one straight copy. Otherwise each box of the old
sharding that overlaps the wanted box gives its share.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.checkpoint import copier
from holdfast.model.errors import StateError, UsageError
from holdfast.torch.checkpoint.images import dtype_named, lies_in_a_row, tensor_at
from holdfast.torch.checkpoint.shard_map import Chunk, Lengths, SavedTensor


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of a saved chunk that is copied to a box of a live tensor."""

    name: str
    rank: int
    """The rank whose file has it."""
    data: int
    """Where the saved chunk's raw bytes begin in the file."""
    dtype: str
    sizes: Lengths
    """The sizes of the saved chunk."""
    source: Lengths
    """Where the box begins in the saved chunk."""
    target: Lengths
    """Where the box begins in the live tensor."""
    lengths: Lengths
    live: torch.Tensor


def overlap(
    first: tuple[Lengths, Lengths], second: tuple[Lengths, Lengths]
) -> tuple[Lengths, Lengths] | None:
    """Offsets and lengths of the overlap of two boxes (offsets, sizes); None if there is none."""
    begins = tuple(max(a, b) for a, b in zip(first[0], second[0], strict=True))
    ends = tuple(
        min(a + m, b + n) for a, m, b, n in zip(*first, *second, strict=True)
    )  # An empty box has an end before its begin.
    if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
        return None
    return begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True))


def copies_for(chunk: Chunk, live: torch.Tensor, saved: SavedTensor) -> Iterator[Copy]:
    """The copies that fill this chunk. UsageError: it was saved with another shape."""
    if saved.shape != chunk.shape:
        raise UsageError(
            f"{chunk.name} has the shape {list(chunk.shape)}, "
            f"but {list(saved.shape)} in the checkpoint."
        )
    wanted, found = math.prod(chunk.sizes), 0
    for piece in saved.chunks:
        common = overlap((chunk.offsets, chunk.sizes), (piece.offsets, piece.sizes))
        if common is None:
            continue
        begins, lengths = common
        found += math.prod(lengths)
        yield Copy(
            chunk.name,
            piece.rank,
            piece.data,
            saved.dtype,
            piece.sizes,
            tuple(at - offset for at, offset in zip(begins, piece.offsets, strict=True)),
            tuple(at - offset for at, offset in zip(begins, chunk.offsets, strict=True)),
            lengths,
            live,
        )
    if found != wanted:
        raise StateError(
            f"The checkpoint has {found} of {wanted} elements of this rank's share of {chunk.name}."
        )


def check_bounds(copies: Iterable[Copy], files: Mapping[int, memoryview]) -> None:
    """StateError if an index points outside its file; until then no tensor has changed."""
    for copy in copies:
        end = copy.data + math.prod(copy.sizes) * dtype_named(copy.dtype).itemsize
        if end > len(files[copy.rank]):
            raise StateError(
                f"The index of {copy.name} points to byte {end} of a file "
                f"of {len(files[copy.rank])} bytes."
            )


def run_copies(copies: Iterable[Copy], files: Mapping[int, memoryview]) -> None:
    """Copy everything; no tensor refers to the files afterwards."""
    for copy in copies:
        _copy_box(copy, files[copy.rank])


def tasks_of(copies: Iterable[Copy], files: Mapping[int, memoryview]) -> Iterator[copier.Task]:
    """The same as tasks for a copier, as plain runs of bytes if possible."""
    for copy in copies:
        source, target = _boxes(copy, files[copy.rank])
        is_plain = target.device.type == "cpu" and source.dtype == target.dtype
        if is_plain and lies_in_a_row(source) and lies_in_a_row(target):
            yield copier.Copy(source.data_ptr(), target.data_ptr(), source.nbytes)
        else:
            yield partial(_copy_box, copy, files[copy.rank])


def _boxes(copy: Copy, file: memoryview) -> tuple[torch.Tensor, torch.Tensor]:
    source = tensor_at(file, copy.data, dtype_named(copy.dtype), copy.sizes)
    target = copy.live.detach()
    for dim, length in enumerate(copy.lengths):
        source = source.narrow(dim, copy.source[dim], length)
        target = target.narrow(dim, copy.target[dim], length)
    return source, target


def _copy_box(copy: Copy, file: memoryview) -> None:
    source, target = _boxes(copy, file)
    with torch.no_grad():
        target.copy_(source)
