# SPDX-License-Identifier: Apache-2.0
"""From the user's modules and optimizers to chunks of tensors and plain values, and back.

torch.distributed.checkpoint knows how to name the state of a sharded model after its parameters,
and which box of each tensor this rank holds. Both take it some time, so the answer is kept for as
long as the live objects stay the same: from one step to the next only their contents change.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint.images import dtype_name
from holdfast.torch.checkpoint.shard_map import SMALL, Chunk, Path
from holdfast.torch.checkpoint.sharding import is_fsdp1, is_old_shard

State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Leaves:
    """The state of this rank, taken apart. The tensors are the live ones."""

    chunks: tuple[Chunk, ...]
    tensors: tuple[torch.Tensor, ...]
    """The local tensor of each chunk."""
    early: tuple[bool, ...]
    """Whether the next forward pass may change it."""
    values: dict[str, Any]
    """The values that are no tensors."""
    paths: dict[str, Path]


class LiveState:
    """The state of the user's objects, as nested dicts that share their tensors."""

    def __init__(self, model: object, optimizer: object) -> None:
        self.models = _keyed(model, Module)
        self.optimizers = _keyed(optimizer, Optimizer)
        for key, one in self.optimizers.items():
            if isinstance(one, Optimizer) and not isinstance(self.models.get(key), Module):
                raise UsageError(
                    "The state of an optimizer is named after the parameters of its model: give "
                    "the model too, under the same key where there are several."
                )

    def leaves(self) -> Leaves:
        """The leaves for a save. An optimizer that has not stepped yet is left as it is."""
        return self.take_apart(self.nested(frozenset()))

    def nested(self, initialised: frozenset[str]) -> State:
        """The whole state; optimizers under these keys get their first state if they have none."""
        models = {key: _model_state(one) for key, one in self.models.items()}
        optimizers = {
            key: self._optimizer_state(key, one, key in initialised)
            for key, one in self.optimizers.items()
        }
        state: State = {}
        for name, given in (("model", models), ("optimizer", optimizers)):
            if given:
                state[name] = given.get("", given)
        return state

    def _optimizer_state(self, key: str, one: Any, initialise: bool) -> Any:
        if not isinstance(one, Optimizer):
            return one
        if one.state or initialise:
            return get_optimizer_state_dict(self.models[key], one)
        # torch would make a first state by a step, and that step would count. Empty entries make
        # torch believe that there is a state.
        one.state.update({p: {} for group in one.param_groups for p in group["params"]})
        try:
            return get_optimizer_state_dict(self.models[key], one)
        finally:
            one.state.clear()

    def take_apart(self, state: State) -> Leaves:
        """Ask torch's planner which box of which tensor this rank holds."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=False)
        buffers = self._buffer_names()
        chunks: list[Chunk] = []
        tensors: list[torch.Tensor] = []
        for item in planner.create_local_plan().items:
            if item.tensor_data is not None:
                local = planner.resolve_data(item)
                assert isinstance(local, torch.Tensor)
                chunks.append(chunk_of(item))
                tensors.append(local.detach())
        early = tuple(
            chunk.name in buffers or tensor.nbytes <= SMALL
            for chunk, tensor in zip(chunks, tensors, strict=True)
        )
        values = {
            name: value
            for name, value in planner.state_dict.items()
            if not isinstance(value, torch.Tensor) and not is_old_shard(value)
        }
        return Leaves(tuple(chunks), tuple(tensors), early, values, dict(planner.mappings))

    def _buffer_names(self) -> frozenset[str]:
        return frozenset(
            ".".join(filter(None, ("model", key, name)))
            for key, one in self.models.items()
            if isinstance(one, Module)
            for name, _ in one.named_buffers()
        )

    def for_loading(self, saved_names: Iterable[str]) -> "LoadTarget":
        """The tensors to copy into, given the names of the saved tensors."""
        return LoadTarget(self, saved_names)

    # ---- the same objects as last time --------------------------------------------------

    def identity(self) -> list[object] | None:
        """The live objects whose contents make the state; None if they cannot be identified."""
        model, optimizer = self.models.get(""), self.optimizers.get("")
        if not isinstance(model, Module) or (self.optimizers and optimizer is None):
            return None
        found: list[object] = [model, optimizer, *_told_apart(model.parameters())]
        found.extend(_told_apart(model.buffers()))
        if isinstance(optimizer, Optimizer):
            for state in optimizer.state.values():
                found.extend(_told_apart(state.values()))
            for group in optimizer.param_groups:
                found.extend(group)
                found.extend(_told_apart(v for v in group.values() if _is_tensor(v)))
        elif optimizer is not None:
            return None
        return found

    def group_value(self, path: Path) -> Any:
        """The value of an optimizer's group now."""
        optimizer = self.optimizers[""]
        assert isinstance(optimizer, Optimizer)
        return optimizer.param_groups[int(path[2])][str(path[3])]


class LoadTarget:
    """Live tensors to copy into, and what remains to be done when they are filled.

    Until `finish` the user's objects show no change.
    """

    def __init__(self, live: LiveState, saved_names: Iterable[str]) -> None:
        self._live = live
        saved = list(saved_names)
        self._stateless = frozenset(
            key
            for key, one in live.optimizers.items()
            if isinstance(one, Optimizer) and not _has_state(key, saved)
        )
        self._first_states: dict[str, dict[Any, Any]] = {}
        self._state = self._collect()
        self.leaves = live.take_apart(self._state)
        self.roots = frozenset(self._state)

    def _collect(self) -> State:
        """Collect the state; undo what torch had to do to the optimizers for it."""
        optimizers = {
            key: one for key, one in self._live.optimizers.items() if isinstance(one, Optimizer)
        }
        before = {key: dict(one.state) for key, one in optimizers.items()}
        for key in self._stateless:
            optimizers[key].state.clear()
        try:
            return self._live.nested(frozenset(optimizers) - self._stateless)
        finally:
            for key, one in optimizers.items():
                if not before[key] and key not in self._stateless:
                    self._first_states[key] = dict(one.state)
                one.state.clear()
                one.state.update(before[key])

    def finish(self, values: Mapping[str, Any], paths: Mapping[str, Path]) -> None:
        """The tensors are filled: set the values, and load the state where objects need a call."""
        for name, value in values.items():
            path = paths[name]
            is_parameter_list = path[0] == "optimizer" and path[-1] == "params"
            if path[0] in self.roots and not is_parameter_list:
                _put(self._state, path, value)
        for key, first in self._first_states.items():
            self._live.optimizers[key].state.update(first)
        for key, one in self._live.models.items():
            if isinstance(one, Module):
                self._finish_model(one, _under(self._state["model"], key))
        for key, one in self._live.optimizers.items():
            if isinstance(one, Optimizer):
                self._finish_optimizer(key, one, _under(self._state["optimizer"], key))

    def _finish_model(self, module: Module, state: State) -> None:
        # A tensor of the state is the module's own, except with FSDP1. Any other value is a copy.
        is_shared = all(isinstance(value, torch.Tensor) for value in state.values())
        if not is_shared or is_fsdp1(module):
            set_model_state_dict(module, state)

    def _finish_optimizer(self, key: str, optimizer: Optimizer, state: State) -> None:
        entries = [value for one in state["state"].values() for value in one.values()]
        is_shared = all(isinstance(value, torch.Tensor) for value in entries)
        if not entries:
            optimizer.state.clear()
        if not entries or (is_shared and not is_fsdp1(self._live.models[key])):
            for group, loaded in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({k: v for k, v in loaded.items() if k != "params"})
        else:
            set_optimizer_state_dict(self._live.models[key], optimizer, state)


class Follower:
    """Takes the state apart again only when it is made of other objects than last time."""

    def __init__(self) -> None:
        self._identity: list[object] | None = None
        self._leaves: Leaves | None = None

    def leaves(self, model: object, optimizer: object) -> Leaves:
        """The state now."""
        live = LiveState(model, optimizer)
        identity = live.identity()
        known = self._leaves
        if known is None or identity is None or not _same(identity, self._identity):
            self._leaves = known = live.leaves()
            # Only the values of an optimizer's groups can be read again without torch's help.
            is_simple = all(
                path[:2] == ("optimizer", "param_groups") and len(path) == 4
                for path in (known.paths[name] for name in known.values)
            )
            self._identity = live.identity() if is_simple and _shares_all(known, live) else None
            return known
        values = {
            name: value if known.paths[name][3] == "params" else live.group_value(known.paths[name])
            for name, value in known.values.items()
        }
        return replace(known, values=values)


def _same(first: list[object], second: list[object] | None) -> bool:
    if second is None or len(first) != len(second):
        return False
    # Texts are names of settings, numbers are places; all others must be the same object.
    return all(
        a is b or (type(a) in (str, int) and a == b) for a, b in zip(first, second, strict=True)
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _shares_all(leaves: Leaves, live: LiveState) -> bool:
    """Whether every tensor of the state shares its memory with a live one: FSDP1 gives copies."""
    places = {
        tensor.data_ptr()
        for tensor in live.identity() or ()
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)
    }
    return all(tensor.data_ptr() in places for tensor in leaves.tensors if tensor.numel())


def _told_apart(tensors: Iterable[object]) -> Iterator[object]:
    """The tensors and the places of their bytes: `p.data = other` changes only the place."""
    for tensor in tensors:
        yield tensor
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor  # to_local() would make a new object each time.
            yield tensor
        if isinstance(tensor, torch.Tensor):
            yield tensor.data_ptr()
            yield tensor.numel()


def _keyed(given: object, kind: type) -> dict[str, Any]:
    """The user's objects by key; a single one has the key ""."""
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        return {str(number): one for number, one in enumerate(given)}
    if isinstance(given, Mapping) and any(isinstance(one, kind) for one in given.values()):
        return {str(key): one for key, one in given.items()}
    return {"": given}


def _under(state: Any, key: str) -> Any:
    return state[key] if key else state


def _model_state(one: Any) -> Any:
    return get_model_state_dict(one) if isinstance(one, Module) else one


def chunk_of(item: WriteItem) -> Chunk:
    about = item.tensor_data
    assert about is not None
    return Chunk(
        item.index.fqn,
        dtype_name(about.properties.dtype),
        tuple(about.size),
        tuple(about.chunk.offsets),
        tuple(about.chunk.sizes),
    )


def _has_state(key: str, saved: list[str]) -> bool:
    prefix = f"optimizer.{key}.state." if key else "optimizer.state."
    return any(name.startswith(prefix) for name in saved)


def _put(state: State, path: Path, value: object) -> None:
    """Set one value in the nested state."""
    place: Any = state
    try:
        for step in path[:-1]:
            place = place[_key_in(place, step)]
        place[_key_in(place, path[-1])] = value
    except (KeyError, IndexError, TypeError) as error:
        where = ".".join(map(str, path))
        raise UsageError(
            f"The checkpoint has a value for {where}, but the live state has no such place."
        ) from error


def _key_in(place: Any, step: str | int) -> Any:
    """torch turns all keys into text: find the original key."""
    if isinstance(place, Mapping) and step not in place:
        return next((key for key in place if str(key) == step), step)
    return step
