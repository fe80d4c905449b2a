# SPDX-License-Identifier: Apache-2.0
"""A committed checkpoint as one file of another format, for `holdfast ckpt export`."""

import io
import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holdfast.checkpoint.manifest import Committed
from holdfast.checkpoint.storage_port import Storage
from holdfast.checkpoint.verify import copy_checkpoint
from holdfast.model.checkpoint import SHARED, rank_part
from holdfast.model.errors import StateError, UsageError
from holdfast.torch.checkpoint import opaque, plain, state
from holdfast.torch.checkpoint.agreed import MAP_FILE, ChunkMap, decode_map
from holdfast.torch.checkpoint.dcp_image import data_file
from holdfast.torch.checkpoint.images import (
    Leaf,
    dtype_named,
    fill,
    is_shape,
    safetensors_image,
    tensor_at,
)
from holdfast.torch.checkpoint.reshard import check_bounds, copies_for, run_copies
from holdfast.torch.checkpoint.shard_map import Chunk
from holdfast.torch.checkpoint.shard_map import Path as StatePath


def export_checkpoint(storage: Storage, one: Committed, target: Path, file_format: str) -> None:
    """Write model and optimizer of a checkpoint as `file_format` to `target`.

    "safetensors": only the tensors of the model, in one file. "torch": model, optimizer and what
    rank 0 saved beside them, in a file for torch.load. "dcp": a directory for
    torch.distributed.checkpoint. StateError if the checkpoint is damaged.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        copy = Path(folder) / "copy"
        copy_checkpoint(storage, one, copy, lambda _: None)
        ready = Path(folder) / "ready"
        if (copy / MAP_FILE).exists():
            _export_sharded(copy, ready, file_format)
        else:
            _export_plain(copy, ready, file_format)
        ready.rename(target)


def _export_plain(copy: Path, target: Path, file_format: str) -> None:
    found = read_plain(copy)
    for name in ("rng", "positions"):
        found.pop(name, None)  # Rank 0's own, and useful only for a resumed run.
    if file_format == "safetensors":
        _save_safetensors(found.get("model"), target)
    elif file_format == "torch":
        torch.save(found, target)
    else:
        dcp_save({"model": found.get("model", {})}, checkpoint_id=target, no_dist=True)


def _export_sharded(copy: Path, target: Path, file_format: str) -> None:
    if file_format == "dcp":
        copy.rename(target)
        return
    found = read_sharded(copy)
    if file_format == "torch":
        torch.save(found, target)
    else:
        _save_safetensors(found.get("model"), target)


def _save_safetensors(model: Any, target: Path) -> None:
    leaves = _leaves(model, "")
    if not leaves:
        raise UsageError("the checkpoint has no model whose tensors could be exported")
    image, _ = safetensors_image(target.name, leaves)
    with target.open("w+b") as file:
        # Not ftruncate: on a full disk, a write to the mapping would kill this process with SIGBUS.
        os.posix_fallocate(file.fileno(), 0, image.length)
        with mmap.mmap(file.fileno(), image.length) as mapping:
            fill(image, memoryview(mapping))


def _leaves(value: Any, name: str) -> list[Leaf]:
    """All tensors, by their dotted names."""
    if isinstance(value, torch.Tensor):
        return [Leaf(name, value.detach())]
    if not isinstance(value, dict):
        return []
    return [
        leaf
        for key, item in value.items()
        for leaf in _leaves(item, f"{name}.{key}" if name else str(key))
    ]


def read_plain(folder: Path) -> dict[str, Any]:
    """The contents of a plain checkpoint's directory: "model", "optimizer", rank 0's "extra"..."""
    values: dict[str, Any] = {}
    for part in (SHARED, rank_part(0)):
        index = folder / f"{part}.json"
        if not index.exists():
            continue
        fields = state.decode_index(index.read_bytes())
        if fields.get("kind") != plain.KIND:
            raise UsageError(f"{index.name} is of kind {fields.get('kind')}, not {plain.KIND}")
        data = memoryview(_content(folder / f"{part}.safetensors"))
        trees, entries = plain.read_index(fields, len(data))

        def tensor(number: int, data: memoryview = data, entries: Any = entries) -> torch.Tensor:
            entry = entries[number]
            return tensor_at(data, entry.offset, dtype_named(entry.dtype), entry.shape).clone()

        for name, tree in trees.items():
            values[name] = state.rebuild(tree, tensor)
    if not values:
        raise UsageError("this checkpoint has files of a framework's own format: export it by copy")
    return values


def read_sharded(folder: Path) -> dict[str, Any]:
    """The contents of a sharded checkpoint's directory, put together from all ranks' files.

    Read by Holdfast's own map, because torch's reader of `.metadata` runs any code in that file.
    """
    chunk_map = decode_map(_content(folder / MAP_FILE))
    files = {
        rank: memoryview(_content(folder / data_file(rank))) for rank in sorted(_ranks(chunk_map))
    }
    found: dict[StatePath, Any] = {}
    for name, saved in chunk_map.tensors.items():
        size = math.prod(saved.shape) * dtype_named(saved.dtype).itemsize
        if not is_shape(saved.shape) or size > sum(map(len, files.values())):
            raise StateError(f"{MAP_FILE} has {name!a} with the shape {list(saved.shape)}")
        tensor = torch.empty(saved.shape, dtype=dtype_named(saved.dtype))
        origin = (0,) * len(saved.shape)
        whole = Chunk(name, saved.dtype, saved.shape, origin, saved.shape)
        copies = list(copies_for(whole, tensor, saved)) if tensor.numel() else []
        check_bounds(copies, files)
        run_copies(copies, files)
        found[_path(chunk_map, name)] = tensor
    for name, room in chunk_map.values.items():
        data = files[room.rank][room.offset : room.offset + room.length]
        found[_path(chunk_map, name)] = _value(name, bytes(data))
    return _nested(found)


def _ranks(chunk_map: ChunkMap) -> set[int]:
    pieces = (chunk.rank for saved in chunk_map.tensors.values() for chunk in saved.chunks)
    return {*pieces, *(room.rank for room in chunk_map.values.values())}


def _path(chunk_map: ChunkMap, name: str) -> StatePath:
    """Its place in the state. Older maps lack it: then a name is split at its first dot."""
    known = chunk_map.paths.get(name)
    if known:
        return known
    first, _, rest = name.partition(".")
    return (first, rest) if rest else (first,)


def _value(name: str, data: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except opaque.NOT_LOADED as exc:
        raise UsageError(
            f"{name!a} can only be read by running what stands in the checkpoint: export it by copy"
        ) from exc


def _nested(found: dict[StatePath, Any]) -> dict[str, Any]:
    """Dicts within dicts; lists where the steps of the paths are numbers from 0 on."""
    root: dict[str | int, Any] = {}
    for path, value in found.items():
        inner = root
        for step in path[:-1]:
            inner = inner.setdefault(step, _Level())
            if not isinstance(inner, _Level):
                raise StateError(f"{MAP_FILE} has something below {list(path)!a}, a value")
        inner[path[-1]] = value
    return {str(key): _listed(value) for key, value in root.items()}


class _Level(dict[str | int, Any]):
    """A level that paths lead through, as opposed to a value that is a dict."""


def _listed(value: Any) -> Any:
    if not isinstance(value, _Level):
        return value
    items = {key: _listed(item) for key, item in value.items()}
    if items.keys() == set(range(len(items))):
        return [items[number] for number in range(len(items))]
    return items


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise StateError(f"the checkpoint's {path.name} cannot be read: {exc.strerror}") from exc
