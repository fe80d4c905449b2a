# SPDX-License-Identifier: Apache-2.0
"""A save that goes on in the background while the next forward and backward pass run.

Parameters and optimizer state change only in `optimizer.step()` and in loads. While a save is under
way, hooks there wait until it has copied everything. If the user's code changes a tensor without
passing a hook, the tensor's version counter shows it: the slot is then not sealed, and the previous
save stays the newest.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint.copier import CopyJob, Pace, Task
from holdfast.model.errors import HoldfastError, TimedOutError
from holdfast.torch.checkpoint.images import Hole
from holdfast.torch.checkpoint.staging import Staged

GENTLE_BYTES_PER_S = 5e9
"""A copy at full speed makes other threads wait for memory: it costs the training beside it about
twice as much as a copy at this pace. Slower paces were not seen to cost less (bench/pace.py)."""


def gentle_pace(length: int, room_s: float) -> Pace:
    """The pace of a copy of `length` bytes; the training left the copy before it `room_s` seconds.

    The copy must not be late for the next step, so it is planned to end in half of that time.
    `room_s` 0: the time is not known.
    """
    return Pace(max(GENTLE_BYTES_PER_S, 2 * length / room_s)) if room_s > 0 else Pace()


class _Handle(Protocol):
    def remove(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Work:
    """The objects that a save under way refers to."""

    holes: Sequence[Hole]
    versions: Sequence[int]
    staged: Staged
    job: CopyJob
    seal: Callable[[], None]


class BackgroundSave:
    """One save under way: the copy and its end."""

    def __init__(
        self,
        holes: Sequence[Hole],
        staged: Staged,
        tasks: Sequence[Task],
        pace: Pace,
        seal: Callable[[], None],
        failed: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        """`tasks` are the host copies of `staged`, at this pace until a caller waits for them.

        `seal` is called in the background when everything is copied and no tensor has changed,
        `failed` with the reason if the save cannot become a checkpoint.
        """
        self._work: _Work | None = _Work(
            holes, [_version(hole.tensor) for hole in holes], staged, CopyJob(tasks), seal
        )
        self._pace = pace
        self._failed = failed
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self.room_s = 0.0
        """How long it ran before a caller waited for it; 0 until then."""
        self._check = threading.Lock()
        self._is_checked = False
        self.problem = ""
        """Why it did not become a checkpoint; empty if it did, or while it is under way."""
        # Not a daemon: a program that ends after a save has saved.
        self._thread = threading.Thread(target=self._run, name="holdfast-overlap")
        self._thread.start()

    def let_change(self) -> None:
        """Called before tensors change: wait for the copies that are not done yet."""
        self._hurry()
        work = self._work
        if work is None:
            return
        self._check_versions(work)
        work.staged.hold_back_changes()
        try:
            work.job.wait(self._timeout_s)
        except (TimedOutError, RuntimeError) as exc:
            # The training goes on. The copy may be torn from here on, so it must not be sealed.
            self._give_up(str(exc))

    def wait(self) -> None:
        """Wait until it is a checkpoint, or has failed."""
        self._hurry()
        self._thread.join(2 * self._timeout_s)
        if self._thread.is_alive():
            self._give_up(f"it was not over within {2 * self._timeout_s:g} s")

    def _hurry(self) -> None:
        self.room_s = self.room_s or time.monotonic() - self._began
        self._pace.hurry()

    def _run(self) -> None:
        work = self._work
        assert work is not None
        try:
            work.job.wait(self._timeout_s)
            self._check_versions(work)
            work.staged.finish()
            if not self.problem:
                work.seal()
        except (HoldfastError, OSError, RuntimeError) as exc:
            self._give_up(str(exc))
        # It refers to the slot's memory, which could not be unmapped otherwise.
        self._work = None
        if self.problem:
            self._failed(self.problem)

    def _check_versions(self, work: _Work) -> None:
        """Look once, at the last moment at which the tensors must still be unchanged."""
        with self._check:
            if self._is_checked:
                return
            self._is_checked = True
            for hole, version in zip(work.holes, work.versions, strict=True):
                if _version(hole.tensor) != version:
                    self._give_up(
                        f"{hole.label or 'a tensor'} was changed while it was copied, by something "
                        "other than optimizer.step(): save without overlap, or change it later"
                    )
                    return

    def _give_up(self, why: str) -> None:
        self.problem = self.problem or why


class Gate:
    """Hooks that make changes wait for the save under way, if there is one.

    They stay until `close`: torch runs hooks while it walks over a dictionary of them, which
    another thread must not change.
    """

    def __init__(self) -> None:
        self.save: BackgroundSave | None = None
        self._handles: list[_Handle] = []
        self._watched: weakref.WeakSet[torch.nn.Module | torch.optim.Optimizer] = weakref.WeakSet()

    def watch(self, objects: Iterable[torch.nn.Module | torch.optim.Optimizer]) -> None:
        """Wait before every optimizer's step in this process and loads into these objects."""
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._before))
        for item in objects:
            if item not in self._watched:
                self._watched.add(item)
                self._handles.append(item.register_load_state_dict_pre_hook(self._before))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, *_: Any, **__: Any) -> None:
        if self.save is not None:
            self.save.let_change()


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed; a tensor made in inference mode has no counter."""
    return 0 if tensor.is_inference() else tensor._version
