# SPDX-License-Identifier: Apache-2.0
"""Loads a state into live objects, whether it was saved plain or sharded."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from holdfast.model.checkpoint import rank_part
from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint import plain, sharding, state
from holdfast.torch.checkpoint.restore import Loading, OpenPart, Parts

if TYPE_CHECKING:
    from holdfast.torch.checkpoint.sharded import Sharded


class StateLoading:
    """Finds out how a checkpoint was saved, and loads it that way."""

    def __init__(
        self,
        model: object,
        optimizer: object,
        sharded: "Callable[[], Sharded]",
        allow_pickle: bool,
    ) -> None:
        """`sharded` is called only if a live object or the checkpoint is sharded."""
        self.is_substitute = False
        """Whether another rank's part stands in for this rank's own part."""
        self._is_sharded = sharding.is_sharded(model, optimizer)
        self._sharded: Callable[[], Loading] = lambda: sharded().loading(
            model, optimizer, allow_pickle
        )
        self._plain: Loading = plain.PlainLoading(model, optimizer, allow_pickle)
        self._chosen: Loading = self._plain

    def prepare(self, parts: Parts) -> None:
        """Choose the way to load, and prepare it."""
        wanted = rank_part(parts.rank)
        rank = parts.rank if parts.shape.shared else parts.rank % parts.shape.world_size
        own = parts.open([rank_part(rank)])[rank_part(rank)]
        self.is_substitute = own.part != wanted
        is_sharded = _kind(own) == sharding.KIND or self._is_sharded
        self._chosen = self._sharded() if is_sharded else self._plain
        self._chosen.prepare(parts)

    def take(self) -> None:
        """Take the bytes the chosen way."""
        self._chosen.take()

    def fill(self) -> dict[str, object]:
        """Load the chosen way."""
        return self._chosen.fill()


def _kind(part: OpenPart) -> str:
    """ "plain" or "sharded"."""
    name = f"{part.part}.json"
    if name not in part.names():
        raise UsageError(
            f"this checkpoint has files of a framework's own format ({', '.join(part.names())}): "
            "load it with the adapter that saved it"
        )
    return str(state.decode_index(part.file(name)).get("kind"))


def hand_over(live: object, value: object, where: str) -> None:
    """Give the objects in `live` their state, which is in `value` at the same places."""
    live = state.unwrapped(live)
    if isinstance(live, state.Stateful):
        live.load_state_dict(value)
    elif isinstance(live, Mapping):
        for key, item in live.items():
            if not isinstance(value, Mapping) or key not in value:
                raise UsageError(f"{where}[{key!r}]: missing in the checkpoint")
            hand_over(item, value[key], f"{where}[{key!r}]")
    elif isinstance(live, list | tuple) and isinstance(value, list | tuple):
        for index, (item, saved) in enumerate(zip(live, value, strict=False)):
            hand_over(item, saved, f"{where}[{index}]")
