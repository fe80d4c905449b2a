# SPDX-License-Identifier: Apache-2.0
"""The names of checkpoints on a file system, where several nodes may rename at once.

A node that stood still does what it had decided long ago, whatever has happened meanwhile. No call
of a file system says "if it is still the same directory". So there is one rule here: *a caller that
wants to change a directory first takes it, by renaming it to a name that only this caller uses, and
then looks at what it has got.* Names for that have the form that readers know, `<name>~...`: at
every moment each committed checkpoint has a name under which it is found. A caller that comes too
late finds that the directory it meant is gone, or sees that it has got another one, and puts that
back.

The plain name is the only one that several callers work on. It belongs to the newest version.
"""

import errno
import secrets
from contextlib import suppress

from holdfast.checkpoint.manifest import (
    AGAIN,
    FORMAT,
    MANIFEST,
    Committed,
    is_whole,
    list_step,
    read_manifest,
)
from holdfast.checkpoint.places import discard
from holdfast.checkpoint.storage_port import Storage
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.errors import RetryableError, StateError

_TRIES = 20
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})


def own_name(name: str) -> str:
    """A name that readers know as a checkpoint's and that no other caller uses."""
    return f"{name}{AGAIN}{secrets.token_hex(8)}"


def make_visible(storage: Storage, draft: str, name: str) -> str:
    """Make a checkpoint of a whole directory that only this caller works on.

    Returns what it is called now: the plain name, or one of the caller's own if that is taken.
    """
    if _can_rename(storage, draft, name):
        return name
    own = own_name(name)
    storage.rename(draft, own)
    return own


def settle_names(storage: Storage, name: str, attempt: str) -> list[str]:
    """Let the newest checkpoint of a step have the plain name; the older ones go."""
    notes: list[str] = []
    for other in storage.folders(""):
        if other.startswith(name + AGAIN):
            own = own_name(name)
            with suppress(FileNotFoundError):
                storage.rename(other, own)
                notes += take_plain_name(storage, own, name, attempt)
    return notes


def take_misnamed(storage: Storage, name: str) -> Committed | None:
    """Take the newest checkpoint of a step if the plain name is gone or an older one's.

    None if all is well, or if another node has been quicker.
    """
    newest = next(iter(list_step(storage, name)), None)
    if newest is None or (version_at(storage, name) or NONE) >= newest.version:
        return None
    return _take(storage, newest, name)


def take_nameless(storage: Storage, name: str) -> Committed | None:
    """Take the newest whole checkpoint of a step if nothing has the plain name.

    None if something has it, if none is whole, or if another node has been quicker.
    """
    if name in storage.folders(""):
        return None
    whole = (one for one in list_step(storage, name) if is_whole(storage, one))
    newest = next(whole, None)
    return None if newest is None else _take(storage, newest, name)


def _take(storage: Storage, committed: Committed, name: str) -> Committed | None:
    own = own_name(name)
    try:
        storage.rename(committed.name, own)
    except FileNotFoundError:
        return None
    return Committed(own, committed.manifest)


def take_plain_name(
    storage: Storage, own: str, name: str, attempt: str, *, removes: bool = True
) -> list[str]:
    """Give the plain name to the newer of two directories: the one that has it, and the one that
    the caller has taken.

    A directory that is not a checkpoint is set aside under the name of the attempt, never removed.
    The older one of two checkpoints is removed, or keeps a name of the caller's own.
    """
    notes: list[str] = []
    for _ in range(_TRIES):
        mine, other = version_at(storage, own), version_at(storage, name)
        if mine is None:
            return notes + _set_aside(storage, own, name, attempt)
        is_newer = other is not None and other > mine
        if is_newer or (other == mine and not _is_worse(storage, name, own)):
            # If the newer one is damaged, keep the one that it should have replaced.
            if removes and _is_whole(storage, name):
                discard(storage, own)
            return notes
        with suppress(FileNotFoundError):  # Another node has been quicker: look again.
            if other is None and _can_rename(storage, own, name):
                return notes
            if other is not None and storage.exchange(own, name):
                continue  # What had the name is now the one that was taken.
            before = own_name(name)
            storage.rename(name, before)
            is_done = False
            with suppress(FileNotFoundError):  # Then what was taken away has to go back.
                is_done = _can_rename(storage, own, name)
            notes += take_plain_name(storage, before, name, attempt, removes=removes)
            if is_done:
                return notes
    raise RetryableError(f"others keep renaming {storage.full(name)}")


def remove_committed(storage: Storage, committed: Committed) -> None:
    """Remove exactly this checkpoint, whatever has its name by now."""
    if not storage.can_rename:
        discard(storage, committed.name)
        return
    name, attempt = committed.name.partition(AGAIN)[0], committed.manifest.attempt
    own = own_name(name)
    try:
        storage.rename(committed.name, own)
    except FileNotFoundError:
        return
    try:
        manifest = read_manifest(storage, own)
    except StateError:
        manifest = None
    if manifest is not None and manifest.attempt == attempt:
        discard(storage, own)
    else:
        take_plain_name(storage, own, name, attempt)


def version_at(storage: Storage, place: str) -> Version | None:
    """Which checkpoint a directory is; NONE if its manifest is damaged, None if it is none."""
    try:
        manifest = read_manifest(storage, place)
    except StateError:
        raw = storage.get(f"{place}/{MANIFEST}")
        return NONE if raw is not None and FORMAT.encode() in raw[:100] else None
    return None if manifest is None else manifest.version


def _is_worse(storage: Storage, name: str, other: str) -> bool:
    return not _is_whole(storage, name) and _is_whole(storage, other)


def _is_whole(storage: Storage, name: str) -> bool:
    try:
        manifest = read_manifest(storage, name)
    except StateError:
        return False
    return manifest is not None and is_whole(storage, Committed(name, manifest))


def _can_rename(storage: Storage, source: str, target: str) -> bool:
    """Rename it, unless the other name is taken."""
    try:
        storage.rename(source, target)
    except OSError as exc:
        if exc.errno not in _TAKEN:
            raise
        return False
    return True


def _set_aside(storage: Storage, own: str, name: str, attempt: str) -> list[str]:
    aside = f"{name}.aside-{attempt}"
    try:
        storage.rename(own, aside)
    except FileNotFoundError:
        return []  # Another node has taken it over.
    return [
        f"{storage.full(name)} was there, but is no checkpoint of Holdfast: "
        f"it is now {storage.full(aside)}"
    ]
