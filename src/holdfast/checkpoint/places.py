# SPDX-License-Identifier: Apache-2.0
"""Where an attempt to store a checkpoint has its files until they are committed, or removed.

On a file system: in `.holdfast/<attempt>/`, which is renamed when all is there. The node that
commits first takes it, as `.holdfast/<attempt>@<a name of its own>`. In a store of objects: under
`<name>~<attempt>`, which no other attempt ever writes to. There the note `.holdfast/<attempt>@<that
name>` lets the remains be found, and `.holdfast/trash-@<that name>` says that they are being
removed.
"""

import secrets
from collections.abc import Collection
from contextlib import suppress

from holdfast.checkpoint.manifest import AGAIN, MANIFEST
from holdfast.checkpoint.storage_port import HIDDEN, Storage, telling
from holdfast.model.checkpoint import Series
from holdfast.model.errors import RejectedError

DAY_S = 24 * 3600.0
TRASH = "trash-"
"""An entry below `.holdfast/` that begins with this is to be removed by any node that finds it."""

_OF = "@"


def place_of(storage: Storage, series: Series, attempt: str, step: int) -> str:
    """The directory that this attempt's files are written to, the same for all nodes that take
    part."""
    _check_attempt(attempt)
    if storage.can_rename:
        return f"{HIDDEN}/{attempt}"
    return f"{series.name(step)}{AGAIN}{attempt}"


def begin(storage: Storage, place: str, attempt: str) -> None:
    """An attempt is about to write its first file."""
    if not storage.can_rename:
        storage.put(f"{HIDDEN}/{attempt}{_OF}{place}", place.encode())


def claim(storage: Storage, attempt: str) -> str | None:
    """Take an attempt's directory, so that only this caller works on it; None if there is none.

    For file systems. Another caller that had taken it finds it gone, whatever it was about to do.
    """
    own = f"{HIDDEN}/{attempt}{_OF}{secrets.token_hex(8)}"
    # First one that a committer had taken: then the plain one is only what a straggler has left.
    for folder in sorted(_drafts(storage, attempt), key=lambda name: name == attempt):
        with suppress(FileNotFoundError):
            storage.rename(f"{HIDDEN}/{folder}", own)
            return own
    return None


def abandon(storage: Storage, attempt: str) -> None:
    """This attempt will never be a checkpoint: remove what it wrote."""
    _check_attempt(attempt)
    with telling(f"the remains of {attempt} in {storage.url} could not be removed"):
        if storage.can_rename:
            remove_drafts(storage, attempt)
            return
        for entry in storage.entries(HIDDEN):
            # The note stays: a straggler may still be writing under that name.
            if entry.startswith(attempt + _OF):
                _remove_uncommitted(storage, entry.partition(_OF)[2])


def remove_drafts(storage: Storage, attempt: str) -> None:
    """Remove what an attempt has written to a file system and not committed."""
    for folder in _drafts(storage, attempt):
        discard(storage, f"{HIDDEN}/{folder}")


def _drafts(storage: Storage, attempt: str) -> list[str]:
    return [name for name in storage.folders(HIDDEN) if name.partition(_OF)[0] == attempt]


def discard(storage: Storage, path: str) -> None:
    """Remove a directory so that it is at no moment half a checkpoint.

    On a file system the caller has taken it, or it was never a checkpoint.
    """
    if storage.can_rename:
        trash = f"{HIDDEN}/{TRASH}{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            storage.rename(path, trash)
            storage.remove(trash)
        return
    storage.put(_trash_note(path), path.encode())
    storage.remove(f"{path}/{MANIFEST}")
    storage.remove(path)
    storage.remove(_trash_note(path))


def is_going(storage: Storage, place: str) -> bool:
    """Whether what is in a place of a store of objects is being removed."""
    return storage.get(_trash_note(place)) is not None


def _remove_uncommitted(storage: Storage, place: str) -> None:
    """Remove objects that are not a checkpoint.

    A commit puts its manifest and then looks for the note that is put here first, so one of the two
    sees the other.
    """
    storage.put(_trash_note(place), place.encode())
    if storage.get(f"{place}/{MANIFEST}") is None:
        storage.remove(place)
    storage.remove(_trash_note(place))


def _trash_note(place: str) -> str:
    return f"{HIDDEN}/{TRASH}{_OF}{place}"


def clean_leftovers(
    storage: Storage, living: Collection[str], older_than_s: float = DAY_S
) -> list[str]:
    """Remove what dead attempts left; returns their names.

    Attempts in `living` are left alone, and so are all that changed lately: a node that is not
    known here may be working on them.
    """
    removed = []
    with telling(f"leftovers in {storage.url} could not be removed"):
        for entry, age_s in storage.entries(HIDDEN).items():
            attempt, _, place = entry.partition(_OF)
            is_trash = entry.startswith(TRASH)
            if attempt in living or (age_s < older_than_s and not is_trash):
                continue
            if storage.can_rename and not is_trash:
                discard(storage, f"{HIDDEN}/{entry}")
            elif place and not storage.can_rename:
                # Never a manifest: a node that began to remove a checkpoint removed its manifest
                # first.
                _remove_uncommitted(storage, place)
            storage.remove(f"{HIDDEN}/{entry}")
            removed.append(entry)
    return removed


def _check_attempt(attempt: str) -> None:
    if not attempt or "/" in attempt or _OF in attempt or attempt.startswith((".", TRASH)):
        raise RejectedError(f"an attempt cannot be called {attempt!r}")
