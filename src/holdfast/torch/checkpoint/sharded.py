# SPDX-License-Identifier: Apache-2.0
"""Saves and loads states that are spread over ranks: FSDP2, FSDP1, tensor parallel models.

Every rank stores what it holds as its own part; nothing is gathered. On storage the parts together
are a checkpoint of torch.distributed.checkpoint. The ranks communicate only when the layout of the
state changes, which happens on all of them at the same save.

A part lists the places of everything that its rank held, so a rank that comes back to the same
sharding reads its own part and little else. For any other sharding rank 0's part has the map of all
chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from msgspec import Struct

from holdfast.checkpoint.copier import Task
from holdfast.model.checkpoint import Shape, rank_part
from holdfast.model.errors import StateError, UsageError
from holdfast.torch.checkpoint import dcp_image, state
from holdfast.torch.checkpoint.agreed import MAP_FILE, AgreedLayout, Exchange, decode_map
from holdfast.torch.checkpoint.images import (
    Entry,
    Image,
    Leaf,
    bytes_image,
    check_entries,
    dtype_named,
    safetensors_image,
    tensor_at,
)
from holdfast.torch.checkpoint.reshard import Copy, check_bounds, copies_for, tasks_of
from holdfast.torch.checkpoint.shard_map import (
    Path,
    SavedTensor,
    check_map,
    is_worth_storing,
)
from holdfast.torch.checkpoint.sharded_state import Follower, Leaves, LiveState, LoadTarget
from holdfast.torch.checkpoint.sharding import KIND

__all__ = ["Sharded", "ShardedLoading"]


class OpenPart(Protocol):
    """A part that can be read here."""

    def names(self) -> list[str]: ...

    def file(self, name: str) -> memoryview: ...


class Parts(Protocol):
    """Gives the parts of the version that is being restored."""

    @property
    def shape(self) -> Shape: ...

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def open(self, names: Sequence[str]) -> Mapping[str, OpenPart]: ...

    def take(self, tasks: Sequence[Task]) -> None: ...


class RankIndex(Struct, frozen=True):
    """The content of rank-NNNNN.json."""

    kind: str
    world_size: int
    tree: Any
    """The rank's own state ("own") and the shared state's values that are no tensors ("values")."""
    tensors: tuple[Entry, ...]
    """The tensors of that tree, in rank-NNNNN.safetensors."""
    chunks: dict[str, SavedTensor]
    """What this rank held of each tensor, and where it is; another rank may have stored it."""
    paths: dict[str, Path]


class Sharded:
    """Saves and loads for one Checkpointer; remembers the layout from save to save."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._exchange = Exchange(world_size)
        self._follower = Follower()
        self._saved_values = _SavedValues()
        self._agreed: AgreedLayout | None = None

    def collect(
        self, model: object, optimizer: object, own: object, allow_pickle: bool = False
    ) -> list[Image]:
        """The files of this rank's part. Collective when the layout has changed."""
        leaves = self._follower.leaves(model, optimizer)
        saved = {name: self._saved_values.of(name, v) for name, v in leaves.values.items()}
        if self._agreed is None or not self._agreed.fits(leaves):
            self._agreed = AgreedLayout(self._rank, leaves, saved, self._exchange)
        return [*self._agreed.images(leaves, saved), *self._index(leaves, own, allow_pickle)]

    def _index(self, leaves: Leaves, own: object, allow_pickle: bool) -> list[Image]:
        assert self._agreed is not None
        flat = state.flatten({"own": own, "values": leaves.values}, "state", allow_pickle)
        # The user may change everything beside the model as soon as this returns.
        tensors = [Leaf(leaf.name, leaf.tensor, early=True) for leaf in flat.leaves]
        name = rank_part(self._rank)
        images: list[Image] = []
        entries: tuple[Entry, ...] = ()
        if tensors:
            image, entries = safetensors_image(f"{name}.safetensors", tensors)
            images.append(image)
        index = {
            "kind": KIND,
            "world_size": self._exchange.world_size,
            "tree": flat.tree,
            "tensors": entries,
            "chunks": self._agreed.own_chunks,
            "paths": self._agreed.own_paths,
        }
        images.append(bytes_image(f"{name}.json", msgspec.json.encode(index)))
        return images

    def loading(
        self, model: object, optimizer: object, allow_pickle: bool = False
    ) -> "ShardedLoading":
        """A load into these objects."""
        return ShardedLoading(model, optimizer, allow_pickle)


class _SavedValues:
    """torch.save of plain values, repeated only for those that changed."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, bytes]] = {}

    def of(self, name: str, value: object) -> bytes:
        # The text of a plain value is exact; a value whose text is shortened is saved each time.
        text = repr(value) if _is_plain(value) else ""
        known = self._known.get(name)
        if text and known is not None and known[0] == text:
            return known[1]
        data = dcp_image.saved_value(value)
        self._known[name] = (text, data)
        return data


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(_is_plain(one) for one in value)  # type: ignore[attr-defined]
    return value is None or type(value) in (bool, int, float, str)


class ShardedLoading:
    """One load: `prepare` finds everything and changes nothing, `take` copies."""

    def __init__(self, model: object, optimizer: object, allow_pickle: bool) -> None:
        self._model, self._optimizer = model, optimizer
        self._allow_pickle = allow_pickle
        self._ready: _Ready | None = None
        self._loaded: dict[str, Any] = {}

    def prepare(self, parts: Parts) -> None:
        """Open what is needed and check that it fits the live objects."""
        self._ready = None
        world_size = parts.shape.world_size
        own_rank = parts.rank % world_size
        own = _opened(parts, [own_rank])[own_rank]
        index = _read_index(own, own_rank)
        saved = index.chunks
        target = LiveState(self._model, self._optimizer).for_loading(saved)
        if world_size != parts.world_size or not _holds_all(saved, target.leaves):
            chunk_map = _read_map(_opened(parts, [0])[0])
            if saved.keys() != chunk_map.keys():
                # Ranks hold different tensors, so names of another rank are no surprise here.
                names = {chunk.name for chunk in target.leaves.chunks}
                chunk_map = {name: chunk_map[name] for name in names & chunk_map.keys()}
            saved = chunk_map
        _check_names(saved, target)
        copies = [
            copy
            for chunk, tensor in zip(target.leaves.chunks, target.leaves.tensors, strict=True)
            if is_worth_storing(chunk)
            for copy in copies_for(chunk, tensor, saved[chunk.name])
        ]
        sources = _opened(parts, sorted({copy.rank for copy in copies}))
        check_bounds(copies, _data_files(sources))
        self._ready = _Ready(own_rank, own, index, target, copies, sources, parts)

    def take(self) -> None:
        """Copy into the live tensors."""
        ready = self._ready
        assert ready is not None
        self._loaded = ready.values(self._allow_pickle)
        files = _data_files(ready.sources)
        ready.parts.take(list(tasks_of(ready.copies, files)))

    def fill(self) -> dict[str, Any]:
        """Complete the live objects; returns what the rank stored beside them."""
        (ready, self._ready), (loaded, self._loaded) = (self._ready, None), (self._loaded, {})
        assert ready is not None
        ready.target.finish(loaded["values"], ready.index.paths)
        own: dict[str, Any] = loaded["own"]
        return own


@dataclass(frozen=True, slots=True)
class _Ready:
    """Everything that a load needs, found and checked. It holds parts, but none of their bytes."""

    rank: int
    """The rank whose own state this rank takes."""
    own: OpenPart
    index: RankIndex
    target: LoadTarget
    copies: list[Copy]
    sources: dict[int, OpenPart]
    parts: Parts

    def values(self, allow_pickle: bool) -> dict[str, Any]:
        """The values in the rank's tree."""
        entries = self.index.tensors
        data = self.own.file(f"{rank_part(self.rank)}.safetensors") if entries else None

        def tensor(number: int) -> torch.Tensor:
            assert data is not None
            entry = entries[number]
            dtype = dtype_named(entry.dtype)
            return tensor_at(data, entry.offset, dtype, entry.shape).clone()

        loaded = state.rebuild(self.index.tree, tensor, allow_pickle)
        if not isinstance(loaded, dict):
            raise StateError(f"The index of rank {self.rank} has no values.")
        return loaded


def _data_files(sources: Mapping[int, OpenPart]) -> dict[int, memoryview]:
    return {rank: part.file(dcp_image.data_file(rank)) for rank, part in sources.items()}


def _opened(parts: Parts, ranks: Sequence[int]) -> dict[int, OpenPart]:
    opened = parts.open([rank_part(rank) for rank in ranks])
    return {rank: opened[rank_part(rank)] for rank in ranks}


def _read_index(part: OpenPart, rank: int) -> RankIndex:
    name = f"{rank_part(rank)}.json"
    try:
        index = msgspec.json.decode(part.file(name), type=RankIndex)
    except msgspec.ValidationError as error:
        raise UsageError(
            "This checkpoint was not saved from a sharded model: load it into an unsharded one "
            f"first ({name}: {error})."
        ) from error
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateError(f"{name} cannot be read: {error}") from error
    check_map(index.chunks, index.world_size)
    if index.tensors:
        check_entries(index.tensors, len(part.file(f"{rank_part(rank)}.safetensors")))
    return index


def _read_map(part: OpenPart) -> dict[str, SavedTensor]:
    try:
        return decode_map(part.file(MAP_FILE)).tensors
    except KeyError as error:
        raise StateError(f"{MAP_FILE} cannot be read: {error}") from error


def _holds_all(saved: Mapping[str, SavedTensor], leaves: Leaves) -> bool:
    """Whether this rank held exactly every chunk that it needs now, and knows every name.

    A rank whose shard of a tensor is empty has stored nothing of it, so its index lacks the name.
    """
    held = {
        (name, piece.offsets, piece.sizes)
        for name, tensor in saved.items()
        for piece in tensor.chunks
    }
    return all(
        (chunk.name, chunk.offsets, chunk.sizes) in held
        if is_worth_storing(chunk)
        else chunk.name in saved
        for chunk in leaves.chunks
    )


def _check_names(saved: Mapping[str, SavedTensor], target: LoadTarget) -> None:
    """UsageError unless the checkpoint and the live objects have the same tensors."""
    names = {chunk.name for chunk in target.leaves.chunks}
    missing = sorted(names - saved.keys())
    unexpected = sorted(
        name for name in saved.keys() - names if name.split(".", 1)[0] in target.roots
    )
    for what, found in (
        ("The checkpoint lacks", missing),
        ("The live objects lack", unexpected),
    ):
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UsageError(f"{what} {', '.join(found[:5])}{more}.")
