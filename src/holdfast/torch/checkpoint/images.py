# SPDX-License-Identifier: Apache-2.0
"""A file of a checkpoint, described before a byte of it is written.

An image is static bytes and holes; a hole is the place of a live tensor's bytes. A save copies the
tensors straight from where they are into the holes: the copy into shared memory is the only
serialisation, and the bytes in memory are the bytes of the file on storage.
"""

import ctypes
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.checkpoint.memory import address_of
from holdfast.model.errors import StateError, UsageError

PAGE = 4096
"""Tensor data starts at a multiple of this, so that a reader can map it."""

_DIMS_MAX = 64
"""The most dimensions that torch allows."""

_SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""The dtypes that safetensors names. Others are plain bytes, with the dtype in Holdfast's index."""


@dataclass(frozen=True, slots=True)
class Hole:
    """The place of a tensor's row-major bytes."""

    offset: int
    tensor: torch.Tensor
    label: str = ""
    """The name in messages."""
    early: bool = False
    """True if the next forward pass may change it: it is copied before save() returns."""


@dataclass(frozen=True, slots=True)
class Image:
    """One file of a part. Pieces and holes cover it without gap or overlap."""

    name: str
    """Relative to the checkpoint's directory; may have "/" in it."""
    length: int
    pieces: tuple[tuple[int, bytes], ...]
    holes: tuple[Hole, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a state, and its name."""

    name: str
    tensor: torch.Tensor
    early: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a tensor in a file. Strides are not kept: the bytes are row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def bytes_image(name: str, data: bytes) -> Image:
    """A file without tensors."""
    return Image(name, len(data), ((0, data),) if data else (), ())


def safetensors_image(name: str, leaves: Sequence[Leaf]) -> tuple[Image, tuple[Entry, ...]]:
    """A valid safetensors file of these tensors, and the place of each of them in it."""
    spec = tuple((leaf.name, leaf.tensor.dtype, tuple(leaf.tensor.shape)) for leaf in leaves)
    layout = _safetensors_layout(spec)
    holes = tuple(
        Hole(entry.offset, leaf.tensor, leaf.name, leaf.early)
        for entry, leaf in zip(layout.entries, leaves, strict=True)
    )
    return Image(name, layout.length, ((0, layout.header),), holes), layout.entries


def tensor_at(
    data: memoryview, offset: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """The tensor at this place: a view of the memory, to copy from and then drop."""
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    view = data[offset : offset + count * dtype.itemsize]
    buffer: object = view
    if view.readonly:
        # torch has no read-only tensors and warns of such a buffer; this one is only copied from.
        buffer = (ctypes.c_char * len(view)).from_address(address_of(view))
        buffer.keep = view  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(tuple(shape))


def lies_in_a_row(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is, byte for byte, its row-major file."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def fill(image: Image, target: memoryview) -> None:
    """Write the whole file here, in this thread."""
    for offset, data in image.pieces:
        target[offset : offset + len(data)] = data
    for hole in image.holes:
        fill_hole(hole, target)


def fill_hole(hole: Hole, target: memoryview) -> None:
    """Write the bytes of one tensor, whatever its strides."""
    tensor = hole.tensor.detach()
    if lies_in_a_row(tensor):
        tensor = tensor.reshape(-1).view(torch.uint8)  # Not every dtype supports copying.
    if tensor.numel():
        tensor_at(target, hole.offset, tensor.dtype, tensor.shape).copy_(tensor)


def is_shape(sides: Sequence[int]) -> bool:
    """Whether torch could have such a tensor."""
    is_counted = len(sides) <= _DIMS_MAX and all(side >= 0 for side in sides)
    return is_counted and math.prod(max(side, 1) for side in sides) < 2**63


def check_entries(entries: Sequence[Entry], length: int) -> None:
    """StateError unless each of these tensors is within a file of this length.

    An index is only a file: its numbers become addresses that are copied from.
    """
    for entry in entries:
        size = dtype_named(entry.dtype).itemsize
        if not is_shape(entry.shape) or entry.length != math.prod(entry.shape) * size:
            raise StateError(
                f"the index of the checkpoint has {entry.length} bytes for {entry.name!a}, which "
                f"is {entry.dtype} {list(entry.shape)}"
            )
        if not 0 <= entry.offset <= length - entry.length:
            raise StateError(
                f"the index of the checkpoint has {entry.name!a} at byte {entry.offset} of a file "
                f"of {length} bytes"
            )


def dtype_named(name: str) -> torch.dtype:
    """torch.float32 for "float32"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"This version of torch has no dtype {name!r}.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Layout:
    header: bytes
    entries: tuple[Entry, ...]
    length: int


# A state keeps its shape from step to step; a changed state gets another layout.
@functools.lru_cache(maxsize=8)
def _safetensors_layout(spec: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> _Layout:
    # The format allows no padding between tensors: wide ones first keeps every tensor aligned.
    order = sorted(range(len(spec)), key=lambda index: -spec[index][1].itemsize)
    begins: dict[int, tuple[int, int]] = {}
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for index in order:
        name, dtype, shape = spec[index]
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        begins[index] = begin, end
        known = _SAFETENSORS_DTYPES.get(dtype)
        fields[name] = {
            "dtype": known or "U8",
            "shape": shape if known else [end - begin],
            "data_offsets": [begin, end],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    start = -(-(8 + len(text)) // PAGE) * PAGE
    header = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    entries = tuple(
        Entry(
            name,
            dtype_name(dtype),
            shape,
            start + begins[index][0],
            begins[index][1] - begins[index][0],
        )
        for index, (name, dtype, shape) in enumerate(spec)
    )
    return _Layout(header, entries, start + end)
