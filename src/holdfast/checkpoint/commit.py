# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint of files that are all on storage: the manifest, the name, the tracker.

Whoever dies between two steps of this leaves the old state of the directory or the new one, and
doing it again from the start finishes it. The order is what guarantees that:

1. All files are there with their sizes, and nothing else is.
2. The manifest is written beside them.
3. The directory gets its name. A checkpoint that had the name goes aside in the same move.
4. The tracker names the newest checkpoint.
5. What went aside is removed.
"""

import errno
import threading
from datetime import UTC, datetime

from holdfast.checkpoint.manifest import (
    AGAIN,
    FORMAT,
    MANIFEST,
    Committed,
    encode_manifest,
    list_committed,
    make_manifest,
    read_manifest,
)
from holdfast.checkpoint.places import discard, place_of
from holdfast.checkpoint.storage_port import HIDDEN, Patience, Storage, persistently, readable_size
from holdfast.model.checkpoint import Series
from holdfast.model.errors import RejectedError, StateError
from holdfast.protocol.checkpoints import CommitOrder
from holdfast.runtime.observe import wall_clock


def commit(
    storage: Storage,
    series: Series,
    order: CommitOrder,
    *,
    patience: Patience | None = None,
    stop: threading.Event | None = None,
) -> list[str]:
    """Commit what the order describes; returns what the user should know beside that.

    It may be done again, by another node too: what is committed already stays as it is.
    RejectedError or RetryableError when it cannot be done; then the old state stands.
    """
    what = f"step {order.version.step} could not be committed in {storage.url}"
    free = storage.free_bytes()
    if free is not None:
        what += f" ({readable_size(free)} were free there)"
    return persistently(
        what,
        lambda: _commit(storage, series, order),
        patience or Patience(),
        stop or threading.Event(),
    )


def _commit(storage: Storage, series: Series, order: CommitOrder) -> list[str]:
    notes: list[str] = []
    name = series.name(order.version.step)
    if not name or "/" in name or AGAIN in name or name.startswith("."):
        raise RejectedError(f"a checkpoint's directory cannot be called {name!r}")
    if not _is_committed(storage, name, order.attempt):
        place = place_of(storage, series, order.attempt, order.version.step)
        _check_files(storage, place, order)
        created = datetime.fromtimestamp(wall_clock(), UTC).isoformat(timespec="milliseconds")
        manifest = make_manifest(series, order, created)
        storage.put(f"{place}/{MANIFEST}", encode_manifest(manifest))
        storage.sync(place)
        if storage.can_rename:
            notes += _give_name(storage, place, name, order.attempt)
    if storage.can_rename:
        _take_plain_name(storage, name, order.attempt)
    point_tracker(storage, series)
    _remove_replaced(storage, name, order.attempt)
    return notes


def _is_committed(storage: Storage, name: str, attempt: str) -> bool:
    for place in (name, f"{name}{AGAIN}{attempt}"):
        try:
            manifest = read_manifest(storage, place)
        except StateError:
            continue
        if manifest is not None and manifest.attempt == attempt:
            return True
    return False


def _check_files(storage: Storage, place: str, order: CommitOrder) -> None:
    """Every file is there with its size; what is there beside them is removed."""
    found = storage.files(place)
    for file in order.files:
        size = found.pop(file.name, None)
        if size == file.size:
            continue
        state = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
        raise RejectedError(
            f"step {order.version.step} cannot be committed: {storage.full(place)}/{file.name} "
            f"{state}, as seen by the node that commits: is the directory shared between nodes?"
        )
    for name in found:
        storage.remove(f"{place}/{name}")


def _give_name(storage: Storage, place: str, name: str, attempt: str) -> list[str]:
    try:
        storage.rename(place, name)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    else:
        return []
    if not _is_ours(storage, name):
        aside = f"{name}.aside-{attempt}"
        storage.rename(name, aside)
        storage.rename(place, name)
        return [
            f"{storage.full(name)} was there, but is no checkpoint of Holdfast: "
            f"it is now {storage.full(aside)}"
        ]
    if storage.exchange(place, name):
        return []
    # The second best: see `_take_plain_name`.
    storage.rename(place, f"{name}{AGAIN}{attempt}")
    return []


def _take_plain_name(storage: Storage, name: str, attempt: str) -> None:
    """Where two directories cannot swap names, the older one goes first.

    At every moment one of the two is there under a name that readers know as this step's.
    """
    again = f"{name}{AGAIN}{attempt}"
    if not storage.files(again):
        return
    if storage.files(name):
        discard(storage, name, attempt)
    storage.rename(again, name)


def _is_ours(storage: Storage, name: str) -> bool:
    """Whether a directory was made by a commit, be its manifest damaged by now."""
    raw = storage.get(f"{name}/{MANIFEST}")
    return raw is not None and FORMAT.encode() in raw[:100]


def _remove_replaced(storage: Storage, name: str, attempt: str) -> None:
    """Remove the checkpoints that had the name before."""
    if storage.can_rename:
        # After an exchange the older checkpoint is where the newer one was written.
        storage.remove(f"{HIDDEN}/{attempt}")
    for other in storage.folders(""):
        if other != name and not other.startswith(f"{name}{AGAIN}"):
            continue
        try:
            manifest = read_manifest(storage, other)
        except StateError:
            continue
        if manifest is not None and manifest.attempt != attempt:
            discard(storage, other, attempt)


def tracker_text(series: Series, newest: Committed) -> bytes:
    """What the tracker says when this is the newest checkpoint."""
    return series.tracker_text.format(name=newest.name, step=newest.manifest.step).encode()


def point_tracker(storage: Storage, series: Series) -> None:
    """Let the tracker name the newest committed checkpoint."""
    if not series.tracker:
        return
    committed = list_committed(storage, series)
    if not committed:
        storage.remove(series.tracker)
        return
    text = tracker_text(series, committed[0])
    if storage.get(series.tracker) != text:
        storage.put(series.tracker, text)
