# SPDX-License-Identifier: Apache-2.0
"""Plain modules and DDP: whole tensors, in a safetensors file with a JSON file beside it.

The model and the optimizer are the same on every rank and make the shared part; the values of one
rank (extra, data, random numbers) make its own part. Each part is two files: NAME.safetensors has
the tensors, NAME.json the tree and the index.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from holdfast.checkpoint.copier import Copy, Task
from holdfast.checkpoint.memory import address_of
from holdfast.model.checkpoint import SHARED, rank_part
from holdfast.model.errors import StateError, UsageError
from holdfast.torch.checkpoint import state
from holdfast.torch.checkpoint.fresh import fresh_tensor
from holdfast.torch.checkpoint.images import (
    Entry,
    Image,
    bytes_image,
    check_entries,
    dtype_name,
    dtype_named,
    lies_in_a_row,
    safetensors_image,
    tensor_at,
)
from holdfast.torch.checkpoint.restore import OpenPart, Parts

KIND = "plain"
FORMAT = 1


def collect(part: str, value: Mapping[str, object], allow_pickle: bool) -> list[Image]:
    """The files of a part with these values, each under its own name."""
    trees: dict[str, object] = {}
    flattener = state.Flattener(allow_pickle)
    for name, item in value.items():
        trees[name] = flattener.tree(item, (name,))
    image, entries = safetensors_image(f"{part}.safetensors", flattener.leaves)
    document = {"format": FORMAT, "kind": KIND, "tree": trees, "tensors": entries}
    return [image, bytes_image(f"{part}.json", state.encode(document))]


def read_index(
    fields: Mapping[str, Any], length: int
) -> tuple[dict[str, state.Tree], tuple[Entry, ...]]:
    """Trees and tensors of an index; StateError if it cannot belong to a file of this length."""
    try:
        trees = msgspec.convert(fields.get("tree"), dict[str, Any])
        entries = msgspec.convert(fields.get("tensors"), tuple[Entry, ...])
    except msgspec.ValidationError as exc:
        raise StateError(f"the index of the checkpoint is damaged: {exc}") from exc
    check_entries(entries, length)
    return trees, entries


class Document:
    """The two files of a part, while they are read."""

    def __init__(self, part: OpenPart) -> None:
        fields = state.decode_index(part.file(f"{part.part}.json"))
        if fields.get("kind") != KIND or fields.get("format") != FORMAT:
            raise UsageError(
                f"part {part.part} of this checkpoint has format {fields.get('format')} of kind "
                f"{fields.get('kind')}; this load reads format {FORMAT} of kind {KIND}"
            )
        self.data = part.file(f"{part.part}.safetensors")
        self.trees, self.entries = read_index(fields, len(self.data))
        self.address = address_of(self.data)

    def copy(self, entry: Entry, target: torch.Tensor) -> Copy:
        """The copy of a tensor's bytes to their target."""
        if entry.length != target.nbytes or not 0 <= entry.offset <= len(self.data) - entry.length:
            raise StateError(f"the index says that {entry.name} is where it cannot be")
        return Copy(self.address + entry.offset, target.data_ptr(), entry.length)


class PlainLoading:
    """Loads a plain checkpoint into live modules and optimizers, in place."""

    def __init__(self, model: object, optimizer: object, allow_pickle: bool) -> None:
        self._live = {"model": model, "optimizer": optimizer}
        self._parts: Parts | None = None
        self._allow_pickle = allow_pickle
        self._forget()

    def _forget(self) -> None:
        self._documents: list[Document] = []
        self._fits: list[_Fit] = []
        self._values: dict[str, Any] = {}

    def prepare(self, parts: Parts) -> None:
        self._forget()
        self._parts = parts
        if not parts.shape.shared and parts.shape.world_size != parts.world_size:
            raise UsageError(
                f"the checkpoint of step {parts.version.step} was saved by "
                f"{parts.shape.world_size} ranks, each with a state of its own: "
                f"{parts.world_size} ranks cannot load it"
            )
        own = rank_part(parts.rank)
        names = [own, SHARED] if parts.shape.shared else [own]
        opened = parts.open(names)
        self._documents = [Document(opened[name]) for name in names]
        problems: list[str] = []
        for document in self._documents:
            fit = _Fit(document, problems)
            self._fits.append(fit)
            rebuilder = state.Rebuilder(fit.tensor, self._allow_pickle)
            for name, tree in document.trees.items():
                live = self._live.get(name)
                if name in self._live and live is None:
                    continue
                self._values[name] = rebuilder.value(tree, live, (name,))
            fit.stateful = rebuilder.stateful
            problems += _misfits(rebuilder.stateful)
        for name, live in self._live.items():
            if live is not None and name not in self._values:
                problems.append(f"{name}: the checkpoint has none")
            elif isinstance(live, dict) and live and name in self._values:
                problems += _key_misfits(live, self._values[name], name)
        if problems:
            shown = "\n  ".join(problems[:20])
            more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise UsageError(
                f"the checkpoint of step {parts.version.step} does not fit; nothing was "
                f"changed:\n  {shown}{more}"
            )

    def take(self) -> None:
        assert self._parts is not None
        self._parts.take([task for fit in self._fits for task in fit.tasks()])

    def fill(self) -> dict[str, object]:
        for fit in self._fits:
            for target in fit.in_place:
                torch.autograd.graph.increment_version(target)
            for taker, value, _ in fit.stateful:
                _hand_over(taker, value)
        for name, live in self._live.items():
            if isinstance(live, dict):
                live.update(self._values[name])
        own = {name: value for name, value in self._values.items() if name not in self._live}
        self._forget()
        return own


class _Fit:
    """Decides for each tensor of a document which tensor takes it, and copies it there."""

    def __init__(self, document: Document, problems: list[str]) -> None:
        self.stateful: list[tuple[state.Stateful, Any, str]] = []
        self.in_place: list[torch.Tensor] = []
        self._document = document
        self._problems = problems
        self._fresh: dict[int, torch.Tensor] = {}
        self._targets: dict[int, tuple[int, str]] = {}
        self._copies: list[tuple[Entry, torch.Tensor]] = []

    def tensor(self, index: int, live: object, where: str) -> torch.Tensor:
        """The live tensor itself, if it can take the saved one; otherwise a new one."""
        entry = self._document.entries[index]
        dtype = dtype_named(entry.dtype)
        if isinstance(live, torch.Tensor):
            if live.dtype == dtype and tuple(live.shape) == entry.shape:
                self._take_in_place(index, live, where)
                return live
            if where.startswith("model"):
                self._problems.append(
                    f"{where}: the checkpoint has {entry.dtype} {list(entry.shape)}, "
                    f"the model {dtype_name(live.dtype)} {list(live.shape)}"
                )
                return live
        if index not in self._fresh:
            self._fresh[index] = fresh_tensor(entry.shape, dtype)
            self._copies.append((entry, self._fresh[index]))
        return self._fresh[index]

    def _take_in_place(self, index: int, live: torch.Tensor, where: str) -> None:
        address = live.data_ptr()
        if address and address in self._targets:
            other, other_where = self._targets[address]
            if other != index:
                self._problems.append(
                    f"{where} and {other_where} are one tensor now, but two in the checkpoint"
                )
            return
        self._targets[address] = (index, where)
        self._copies.append((self._document.entries[index], live.detach()))
        self.in_place.append(live)

    def tasks(self) -> Iterable[Task]:
        """The copies to make."""
        for entry, target in self._copies:
            if entry.length == 0:
                continue
            if target.device.type == "cpu" and lies_in_a_row(target):
                yield self._document.copy(entry, target)
            else:
                yield _strided(self._document.data, entry, target)


def _strided(data: memoryview, entry: Entry, target: torch.Tensor) -> Task:
    def copy() -> None:
        target.copy_(tensor_at(data, entry.offset, target.dtype, entry.shape))

    return copy


def _misfits(stateful: Iterable[tuple[state.Stateful, Any, str]]) -> Iterable[str]:
    """What modules and optimizers lack, or have in excess."""
    for live, value, where in stateful:
        if isinstance(live, torch.nn.Module):
            yield from _key_misfits(live.state_dict(), value, where)
        elif isinstance(live, torch.optim.Optimizer):
            have = [len(group["params"]) for group in live.param_groups]
            saved = [len(group["params"]) for group in value["param_groups"]]
            if have != saved:
                yield (
                    f"{where}: the checkpoint has groups of {saved} parameters, "
                    f"the optimizer of {have}"
                )


def _key_misfits(live: Mapping[Any, Any], saved: Any, where: str) -> Iterable[str]:
    if not isinstance(saved, Mapping):
        yield f"{where}: the checkpoint has a {type(saved).__name__} there"
        return
    for key in live.keys() - saved.keys():
        yield f"{where}[{key!r}]: missing in the checkpoint"
    for key in saved.keys() - live.keys():
        yield f"{where}[{key!r}]: only in the checkpoint"


def _hand_over(live: state.Stateful, value: Any) -> None:
    """Give an object its state. Tensors that were filled in place need not be copied again."""
    if isinstance(live, torch.nn.Module):
        own = {tensor.data_ptr() for tensor in (*live.parameters(), *live.buffers())}
        rest = {
            key: item
            for key, item in value.items()
            if not isinstance(item, torch.Tensor) or (item.numel() and item.data_ptr() not in own)
        }
        if rest:
            live.load_state_dict(rest, strict=False)
        return
    live.load_state_dict(value)
    if isinstance(live, torch.optim.Optimizer):
        _keep_dtypes(live, value)


def _keep_dtypes(optimizer: torch.optim.Optimizer, value: Any) -> None:
    """torch casts the state to its parameter's dtype; this puts back exactly what was saved."""
    for key, saved in value["state"].items():
        live = optimizer.state_dict()["state"].get(key) if isinstance(saved, Mapping) else None
        if live is None:
            continue
        for name, item in saved.items():
            if isinstance(item, torch.Tensor) and live[name].dtype != item.dtype:
                live[name] = item.to(live[name].device)
