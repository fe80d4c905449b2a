# SPDX-License-Identifier: Apache-2.0
"""Checkpointer: what a training script uses to save and load its state.

checkpointer = Checkpointer("/data/run7", storage=EverySteps(1000), keep=KeepLast(3))
step = checkpointer.load(model=model, optimizer=optimizer)
...
checkpointer.save(step, model=model, optimizer=optimizer)
"""

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.checkpoint.manifest import wrong_names
from holdfast.client.progress import saving_step
from holdfast.model.checkpoint import SHARED, Series, Shape, rank_part
from holdfast.model.errors import UsageError
from holdfast.runtime.collector import without_collector
from holdfast.torch.checkpoint import state
from holdfast.torch.checkpoint.files import Files, FilesLoading, LoadedFiles, to_images
from holdfast.torch.checkpoint.following import DataSource, Followers
from holdfast.torch.checkpoint.foreign import read_dlrover, refuse_dlrover, without_wrapper
from holdfast.torch.checkpoint.images import Image
from holdfast.torch.checkpoint.loading import StateLoading, hand_over
from holdfast.torch.checkpoint.policies import Every, EverySteps, Keep, KeepEvery, KeepLast
from holdfast.torch.checkpoint.randomness import set_rng_state
from holdfast.torch.checkpoint.session import MEMORY, STORAGE, Session, Tier

__all__ = ["Checkpointer", "Saved", "MEMORY", "STORAGE", "Tier"]

STEP_MAX = 2**63 - 1
EVERY_STEP = EverySteps(1)
log = logging.getLogger(__name__)

_NAMES = Series(directory="")  # The default names of a series.


@dataclass(frozen=True, slots=True)
class Saved:
    """The outcome of a save."""

    step: int
    taken: bool
    """False when nothing was due, or when the save failed: `why` has the reason."""
    to: Tier | None
    seconds: float
    """How long the training had to wait."""
    why: str = ""


class Checkpointer:
    """Saves the state of a training and loads it again. Every rank makes one and uses it alike."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: Every | None = EVERY_STEP,
        storage: Every | None = None,
        keep: Keep | None = None,
        replicas: int = 0,
        parity: int = 0,
        replicate_every: int = 1,
        slots: int | None = None,
        overlap: bool = False,
        breakpoint: bool = True,
        shared: bool = True,
        timeout_s: float = 600.0,
        pattern: str = _NAMES.pattern,
        tracker: str = _NAMES.tracker,
        tracker_text: str = _NAMES.tracker_text,
    ) -> None:
        """Nothing is opened before the first save or load.

        `every` and `storage` say when a save without `to` goes to memory and to storage.
        `shared=False`: model and optimizer differ from rank to rank, although no tensor is sharded.
        `slots`, `replicas`, `parity`, `replicate_every` and `breakpoint` are explained in
        docs/checkpoints.md, the patterns of names in model/checkpoint.py.
        """
        _check_copies(replicas, parity, replicate_every)
        if wrong := wrong_names(pattern, tracker, tracker_text):
            raise UsageError(f"Checkpoints cannot have {wrong}.")
        is_busy = overlap or storage is not None or replicas > 0 or parity > 0
        self.series = Series(
            directory=_absolute(os.fspath(directory)),
            pattern=pattern,
            tracker=tracker,
            tracker_text=tracker_text,
            keep_last=_keep_last(keep),
            keep_every=keep.steps if isinstance(keep, KeepEvery) else 0,
            replicas=replicas,
            parity=parity,
            replicate_every=replicate_every,
            slots=slots if slots is not None else 3 if is_busy else 2,
            breakpoint=breakpoint,
        )
        self.extra: Any = None
        """What was saved as `extra`, after a load."""
        self.data: Any = None
        """What was saved as `data`, after a load."""
        self._every, self._storage, self._keep = every, storage, keep
        self._overlap = overlap
        self._shared = shared
        self._timeout_s = timeout_s
        self._followers = Followers()
        self._session: Session | None = None

    @property
    def directory(self) -> str:
        """The directory of the checkpoints, in the same form in every process of the job."""
        return self.series.directory

    def follow(self, source: DataSource) -> None:
        """Save and restore the position of these data with the model: DataShards calls it."""
        if self._session is not None:
            raise UsageError("Data must follow a Checkpointer before its first save or load.")
        self._followers.add(source)

    # ---- saving ---------------------------------------------------------------------------------

    # With torch loaded the garbage collector walks over 300,000 objects, in the middle of a call of
    # a few milliseconds.
    @without_collector()
    def save(
        self,
        step: int,
        model: object = None,
        optimizer: object = None,
        extra: object = None,
        data: object = None,
        to: Tier | None = None,
        overlap: bool | None = None,
        allow_pickle: bool = False,
    ) -> Saved:
        """Save this step: to memory, to storage too, or not at all when nothing is due.

        `model` and `optimizer` are objects, lists or dicts of objects, or plain state dicts. Every
        rank calls it for the same steps. With `overlap` it returns at once; parameters and
        optimizer state are copied until the next optimizer.step().
        """
        session = self._opened()
        tier = _tier(session, step, to)
        if tier is None:
            return _not_due(step)
        began = time.monotonic()
        parts, shape = session.collect(model, optimizer, extra, data, allow_pickle)
        hooked = _hookable(model, optimizer)
        return self._write(step, parts, shape, tier, overlap, began, hooked)

    def save_files(
        self,
        step: int,
        files: Files,
        *,
        shared: Files | None = None,
        to: Tier | None = None,
        overlap: bool | None = None,
    ) -> Saved:
        """Save files of a framework's own format: images, bytes, text, or values for torch.save.

        `files` are this rank's, `shared` are the same on every rank; functions that make them are
        called only when a save is due. Either every rank gives `shared`, at every step, or none
        does.
        """
        self._followers.expect_own_state()
        session = self._opened()
        tier = _tier(session, step, to)
        if tier is None:
            return _not_due(step)
        began = time.monotonic()
        place = session.client.place
        parts = {rank_part(place.rank): to_images(files)}
        if shared is not None and place.local_rank == 0:
            parts[SHARED] = to_images(shared)
        shape = Shape(place.world_size, shared is not None)
        return self._write(step, parts, shape, tier, overlap, began)

    def save_parts(
        self,
        step: int,
        images: Mapping[str, Sequence[Image]],
        shape: Shape,
        *,
        to: Tier | None = None,
        overlap: bool | None = None,
    ) -> Saved:
        """Save files that are described already: those of each part that this rank writes."""
        self._followers.expect_own_state()
        session = self._opened()
        tier = _tier(session, step, to)
        if tier is None:
            return _not_due(step)
        return self._write(step, images, shape, tier, overlap, time.monotonic())

    def _write(
        self,
        step: int,
        parts: Mapping[str, Sequence[Image]],
        shape: Shape,
        tier: Tier,
        overlap: bool | None,
        began: float,
        hooked: Iterable[torch.nn.Module | torch.optim.Optimizer] = (),
    ) -> Saved:
        is_overlapped = self._overlap if overlap is None else overlap
        gated = hooked if is_overlapped else None
        why = self._opened().write(step, parts, shape, tier, gated, began)
        return Saved(step, not why, tier, time.monotonic() - began, why)

    # ---- loading --------------------------------------------------------------------------------

    def load(
        self,
        model: object = None,
        optimizer: object = None,
        extra: object = None,
        data: object = None,
        step: int | None = None,
        allow_pickle: bool = False,
    ) -> int | None:
        """Load the newest complete state, or that of a step, in place; returns its step.

        None: there is no such state, and nothing was changed. Every rank calls it, and every rank
        gets the same step. The saved extra and data are then in the attributes of these names;
        objects with load_state_dict that are given here get their state.

        After an error other than UsageError tensors may have changed: the process has to end.
        """
        session = self._opened()
        loading = StateLoading(model, optimizer, lambda: session.sharded, allow_pickle)
        plan, parts = session.agree(loading, _wanted(step))
        loaded: int | None = None
        if parts is not None:
            try:
                own = loading.fill()
            finally:
                parts.close()
            self.extra, self.data = own.get("extra"), own.get("data")
            hand_over(extra, self.extra, "extra")
            hand_over(data, self.data, "data")
            self._followers.own_restored(plan.version.step, own.get("positions"))
            rng = own.get("rng")
            if isinstance(rng, dict) and not loading.is_substitute:
                set_rng_state(rng)
            loaded = plan.version.step
        else:
            loaded = self._load_foreign(session.client.place.rank, model, optimizer, extra, step)
        self._followers.restored()
        if model is not None or optimizer is not None:
            session.reserve(model, optimizer, allow_pickle)
        return loaded

    def _load_foreign(
        self, rank: int, model: object, optimizer: object, extra: object, step: int | None
    ) -> int | None:
        """Load what DLRover saved here, if there is any: model and optimizer by these keys, and the
        rest as extra."""
        found = read_dlrover(self.directory, rank, step)
        if found is None:
            return None
        loaded, saved = found
        for live, key in ((model, "model"), (optimizer, "optimizer")):
            if live is not None and key not in saved:
                raise UsageError(
                    f"{self.directory} has step {loaded} of DLRover, which has no {key!r} but "
                    f"{', '.join(map(ascii, saved))}: load it by what wrote it, or choose another "
                    "directory to begin at 0"
                )
            hand_over(live, without_wrapper(saved.pop(key, None), live), key)
        self.extra = saved
        hand_over(extra, saved, "extra")
        log.warning(
            "step %d of DLRover is loaded from %s; saves go on there", loaded, self.directory
        )
        return loaded

    def load_files(self, step: int | None = None, parts: Sequence[str] = ()) -> LoadedFiles | None:
        """The files of the newest complete state, for a framework that loads them itself.

        `parts`: the parts that this rank reads beside its own and the shared one. Every rank calls
        it. Close the result (it is a context manager). None: there are no files. UsageError: there
        are only files of DLRover.
        """
        self._followers.expect_own_state()
        session = self._opened()
        loading = FilesLoading(parts)
        _, opened = session.agree(loading, _wanted(step))
        if opened is None:
            refuse_dlrover(self.series, step)
        self._followers.restored()
        return None if opened is None else loading.files(opened)

    # ---- the rest -------------------------------------------------------------------------------

    def wait(self, timeout_s: float = 600.0) -> int | None:
        """Wait until every save has arrived; returns the newest step on storage, if any.

        RejectedError: the last save to storage failed, with the reason. TimedOutError: it takes
        longer.
        """
        return self._opened().newest_stored(timeout_s)

    def close(self) -> None:
        """End the background work of this process; the saver in the agent goes on."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _opened(self) -> Session:
        if self._session is None:
            self._session = Session(
                self.series,
                self._every,
                self._storage,
                self._keep,
                self._shared,
                self._timeout_s,
                self._followers,
            )
        return self._session


def _tier(session: Session, step: int, to: Tier | None) -> Tier | None:
    """The tier for a step that the training has finished; None: it is not saved."""
    saving_step(_checked(step))
    return session.tier(step) if to is None else to


def _not_due(step: int) -> Saved:
    return Saved(step, False, None, 0.0, "no save is due at this step")


def _absolute(directory: str) -> str:
    return directory if "://" in directory else os.path.abspath(directory)


def _keep_last(keep: Keep | None) -> int:
    if isinstance(keep, KeepLast):
        return keep.count
    return keep.last if isinstance(keep, KeepEvery) else 0


def _check_copies(replicas: int, parity: int, replicate_every: int) -> None:
    if replicas < 0 or parity < 0 or parity == 1:
        raise UsageError(
            f"replicas is a number of nodes and parity the size of a group of at least 2, "
            f"not {replicas} and {parity}"
        )
    if replicas and parity:
        raise UsageError("replicas and parity protect from the same thing: choose one of them")
    if replicate_every < 1:
        raise UsageError(f"replicate_every is a number of steps from 1 on, not {replicate_every}")
    if replicate_every > 1 and not (replicas or parity):
        raise UsageError(
            f"replicate_every={replicate_every} has nothing to do without replicas or parity"
        )


def _wanted(step: int | None) -> int:
    return -1 if step is None else _checked(step)


def _checked(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_MAX:
        raise UsageError(f"a step is an integer from 0 to {STEP_MAX}, not {step!r}")
    return step


def _hookable(*values: object) -> Iterable[torch.nn.Module | torch.optim.Optimizer]:
    """The modules and optimizers among the user's values."""
    for value in values:
        found = state.unwrapped(value)
        if isinstance(found, torch.nn.Module | torch.optim.Optimizer):
            yield found
        elif isinstance(found, Mapping):
            yield from _hookable(*found.values())
        elif isinstance(found, list | tuple):
            yield from _hookable(*found)
