# SPDX-License-Identifier: Apache-2.0
"""Where an attempt to store a checkpoint puts its files, until they are one and if they never are.

On a file system: in `.holdfast/<attempt>/`, which is renamed when all is there. In a store of
objects: straight under the checkpoint's name. There the note `.holdfast/<attempt>@<name>` says that
the name was used. If it was used before, by a checkpoint or by a try that failed, the attempt's id
is added to the name: a straggler of the older try can then spoil nothing.
"""

from collections.abc import Collection

from holdfast.checkpoint.manifest import AGAIN, MANIFEST
from holdfast.checkpoint.storage_port import HIDDEN, Storage, telling
from holdfast.model.checkpoint import Series
from holdfast.model.errors import RejectedError

DAY_S = 24 * 3600.0
TRASH = "trash-"
"""What begins so below `.holdfast/` is on its way out, whoever finds it."""

_OF = "@"


def place_of(storage: Storage, series: Series, attempt: str, step: int) -> str:
    """The directory that this attempt's files are written to, the same for all who take part."""
    _check_attempt(attempt)
    if storage.can_rename:
        return f"{HIDDEN}/{attempt}"
    used = _notes(storage)
    if attempt in used:
        return used[attempt]
    name = series.name(step)
    if name in used.values() or storage.get(f"{name}/{MANIFEST}") is not None:
        name = f"{name}{AGAIN}{attempt}"
    # Before the first file, so that whoever comes later sees that the name was used.
    storage.put(f"{HIDDEN}/{attempt}{_OF}{name}", name.encode())
    return name


def abandon(storage: Storage, attempt: str) -> None:
    """This attempt will never be a checkpoint: remove what it wrote."""
    _check_attempt(attempt)
    with telling(f"the remains of {attempt} in {storage.url} could not be removed"):
        if storage.can_rename:
            storage.remove(f"{HIDDEN}/{attempt}")
            return
        name = _notes(storage).get(attempt)
        # The note stays: a straggler may still be writing under that name.
        if name is not None and storage.get(f"{name}/{MANIFEST}") is None:
            storage.remove(name)


def discard(storage: Storage, name: str, reason: str) -> None:
    """Remove a checkpoint's directory so that it is at no moment half a checkpoint.

    `reason` makes the name of its remains unique.
    """
    trash = f"{HIDDEN}/{TRASH}{reason}{_OF}{name}"
    if storage.can_rename:
        storage.remove(trash)
        storage.rename(name, trash)
        storage.remove(trash)
        return
    storage.put(trash, name.encode())
    storage.remove(f"{name}/{MANIFEST}")
    storage.remove(name)
    storage.remove(trash)


def clean_leftovers(
    storage: Storage, living: Collection[str], older_than_s: float = DAY_S
) -> list[str]:
    """Remove what dead attempts left; returns their names.

    Attempts in `living` are left alone, and so are all that changed lately: they may be those of
    somebody who is not known here.
    """
    removed = []
    with telling(f"leftovers in {storage.url} could not be removed"):
        for entry, age_s in storage.entries(HIDDEN).items():
            attempt, _, name = entry.partition(_OF)
            is_trash = entry.startswith(TRASH)
            if attempt in living or (age_s < older_than_s and not is_trash):
                continue
            if not storage.can_rename:
                _remove_noted(storage, name, is_trash)
            storage.remove(f"{HIDDEN}/{entry}")
            removed.append(entry)
    return removed


def _remove_noted(storage: Storage, name: str, is_trash: bool) -> None:
    if not name:
        return
    if is_trash:
        storage.remove(f"{name}/{MANIFEST}")
    if storage.get(f"{name}/{MANIFEST}") is None:
        storage.remove(name)


def _notes(storage: Storage) -> dict[str, str]:
    """The names that attempts have used, by attempt."""
    entries = (entry.partition(_OF) for entry in storage.entries(HIDDEN))
    return {attempt: name for attempt, _, name in entries if name}


def _check_attempt(attempt: str) -> None:
    if not attempt or "/" in attempt or _OF in attempt or attempt.startswith((".", TRASH)):
        raise RejectedError(f"an attempt cannot be called {attempt!r}")
