# SPDX-License-Identifier: Apache-2.0
"""A committed checkpoint as one file of another format, for `holdfast ckpt export`."""

import mmap
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holdfast.checkpoint.manifest import Committed
from holdfast.checkpoint.storage_port import Storage
from holdfast.checkpoint.verify import copy_checkpoint
from holdfast.model.checkpoint import SHARED, rank_part
from holdfast.model.errors import UsageError
from holdfast.torch import plain, state
from holdfast.torch.images import Entry, Leaf, fill, safetensors_image, tensor_at

DCP_METADATA = ".metadata"


def export_checkpoint(storage: Storage, one: Committed, target: Path, file_format: str) -> None:
    """Write model and optimizer of a checkpoint as `file_format` to `target`.

    "safetensors": the tensors of the model alone, in one file. "torch": model, optimizer and what
    rank 0 saved beside them, in a file for torch.load. "dcp": a directory for
    torch.distributed.checkpoint. StateError if the checkpoint is damaged.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        copy = Path(folder) / "copy"
        copy_checkpoint(storage, one, copy, lambda _: None)
        ready = Path(folder) / "ready"
        if (copy / DCP_METADATA).exists():
            _export_sharded(copy, ready, file_format)
        else:
            _export_plain(copy, ready, file_format)
        ready.rename(target)


def _export_plain(copy: Path, target: Path, file_format: str) -> None:
    found = read_plain(copy)
    for name in ("rng", "positions"):
        found.pop(name, None)  # Of rank 0 alone, and of no use to anybody but a resumed run.
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
    whole = target.with_name("whole")
    dcp_to_torch_save(copy, whole)
    if file_format == "torch":
        whole.rename(target)
        return
    _save_safetensors(torch.load(whole, weights_only=True, mmap=True).get("model"), target)


def _save_safetensors(model: Any, target: Path) -> None:
    leaves = _leaves(model, "")
    if not leaves:
        raise UsageError("the checkpoint has no model whose tensors could be exported")
    image, _ = safetensors_image(target.name, leaves)
    with target.open("w+b") as file:
        file.truncate(image.length)
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
    """What is in the directory of a plain checkpoint: "model", "optimizer", rank 0's "extra"..."""
    values: dict[str, Any] = {}
    for part in (SHARED, rank_part(0)):
        index = folder / f"{part}.json"
        if not index.exists():
            continue
        fields = state.decode(index.read_bytes())
        if fields.get("kind") != plain.KIND:
            raise UsageError(f"{index.name} is of kind {fields.get('kind')}, not {plain.KIND}")
        entries = msgspec.convert(fields["tensors"], tuple[Entry, ...])
        data = memoryview((folder / f"{part}.safetensors").read_bytes())

        def tensor(number: int, data: memoryview = data, entries: Any = entries) -> torch.Tensor:
            entry = entries[number]
            return tensor_at(data, entry.offset, getattr(torch, entry.dtype), entry.shape).clone()

        for name, tree in fields["tree"].items():
            values[name] = state.rebuild(tree, tensor)
    if not values:
        raise UsageError("this checkpoint has files of a framework's own format: export it by copy")
    return values
