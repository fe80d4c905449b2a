# SPDX-License-Identifier: Apache-2.0
"""Makes a checkpoint of files that are all on storage: the manifest, the name, the tracker.

A node that dies between two of these steps leaves the old state of the directory or the new one,
and doing all steps again finishes the commit. The order of the steps guarantees that:

1. The node takes the directory of the attempt: from now on no other node changes it (file systems).
2. It checks that all files are there with their sizes, and removes anything else.
3. The manifest is written beside them.
4. The directory gets its name. The newest of several checkpoints of a step has the plain one.
5. The tracker names the newest checkpoint.
6. Older checkpoints of the step are removed.

A node may stand still between two steps, and go on when other nodes have committed the same
attempt, a newer version of the step or a later step. It then changes nothing of theirs. On file
systems naming.py takes care of that; in stores of objects every attempt has names of its own.

A checkpoint that has its name is committed. If the fence closes after that, this node still makes
the plain name and the tracker lead to the newest checkpoint, because it may just have taken that
one away from there; it removes nothing. Where two directories cannot swap names, a node that dies
may leave nothing under the plain name: a node that begins to write there puts that in order.
"""

import threading
from collections.abc import Callable
from datetime import UTC, datetime

from holdfast.checkpoint.manifest import (
    AGAIN,
    MANIFEST,
    Committed,
    Manifest,
    encode_manifest,
    is_whole,
    list_all,
    list_step,
    make_manifest,
)
from holdfast.checkpoint.naming import (
    make_visible,
    settle_names,
    take_misnamed,
    take_nameless,
    take_plain_name,
)
from holdfast.checkpoint.places import claim, discard, is_going, place_of, remove_drafts
from holdfast.checkpoint.storage_port import (
    FencedStorage,
    Patience,
    Storage,
    persistently,
    readable_size,
)
from holdfast.model.checkpoint import Series, filled
from holdfast.model.errors import FencedError, RejectedError, RetryableError
from holdfast.protocol.checkpoints import CommitOrder
from holdfast.runtime.observe import wall_clock

_TRIES = 10
"""How often other nodes may change the directory during one commit."""


class _FilesMissingError(RejectedError):
    """What an attempt has written is not where it should be."""


def commit(
    storage: Storage,
    series: Series,
    order: CommitOrder,
    *,
    patience: Patience | None = None,
    stop: threading.Event | None = None,
    fence: Callable[[], None] = lambda: None,
) -> list[str]:
    """Commit what the order describes; returns what else the user should know.

    `fence` is called before every change of the storage; it raises FencedError once this node must
    not make it any more.

    It may be done again, by another node too: what is committed already stays as it is.
    RejectedError or RetryableError when it cannot be done; then the old state stands. They are also
    raised when it was done, but other nodes have since replaced the checkpoint by a newer one or
    removed it.
    """
    what = f"step {order.version.step} could not be committed in {storage.url}"
    free = storage.free_bytes()
    if free is not None:
        what += f" ({readable_size(free)} were free there)"
    return persistently(
        what,
        lambda: _commit_at_last(storage, series, order, fence),
        patience or Patience(),
        stop or threading.Event(),
    )


def _commit_at_last(
    unfenced: Storage, series: Series, order: CommitOrder, fence: Callable[[], None]
) -> list[str]:
    storage = FencedStorage(unfenced, fence)
    for _ in range(_TRIES):
        # Another node may have taken what this one works on: then look at what there is now.
        try:
            return _commit(storage, unfenced, series, order)
        except FileNotFoundError:
            continue
        except _FilesMissingError:
            standing = list_step(storage, series.name(order.version.step))
            if not _is_committed(storage, standing, order):
                raise
    return _commit(storage, unfenced, series, order)


def _commit(storage: Storage, unfenced: Storage, series: Series, order: CommitOrder) -> list[str]:
    notes: list[str] = []
    name = series.name(order.version.step)
    if not name or "/" in name or AGAIN in name or name.startswith("."):
        raise RejectedError(f"a checkpoint's directory cannot be called {name!r}")
    standing = list_step(storage, name)
    visible = name
    if _is_committed(storage, standing, order):
        # It was done by a node that may have died before the names were durable.
        storage.sync(name)
    elif storage.can_rename:
        draft = claim(storage, order.attempt)
        place = draft or place_of(storage, series, order.attempt, order.version.step)
        _check_files(storage, place, order)
        storage.put(f"{place}/{MANIFEST}", _manifest_of(series, order))
        storage.sync(place)
        visible = make_visible(storage, place, name)
    else:
        place = place_of(storage, series, order.attempt, order.version.step)
        _check_files(storage, place, order)
        storage.put(f"{place}/{MANIFEST}", _manifest_of(series, order))
        # Fenced or not: what this call has put there must not stay behind as a ghost.
        _require_files_stay(unfenced, place, order)
    try:
        if visible != name:
            notes += take_plain_name(storage, visible, name, order.attempt)
        if storage.can_rename and standing:
            notes += settle_names(storage, name, order.attempt)
            remove_drafts(storage, order.attempt)
        found = point_tracker(storage, series, unfenced)
        of_step = [one for one in found if one.manifest.step == order.version.step]
        if not storage.can_rename and _has_replaced(storage, of_step):
            of_step = list_step(storage, name)
    except FencedError:
        # Not what this node was about to do, which may be long out of date: it looks again.
        notes += _mend(unfenced, unfenced, series, name)
        of_step = list_step(unfenced, name)
        if any(one.version > order.version for one in of_step):
            raise  # This node came too late: another one removes its checkpoint.
    if not _is_there(storage, of_step, name, order):
        raise RejectedError(
            f"step {order.version.step} of lineage {order.version.lineage} is not there: "
            "others have replaced it by a newer one or removed it"
        )
    return notes


def put_in_order(
    unfenced: Storage, series: Series, fence: Callable[[], None] = lambda: None
) -> list[str] | None:
    """Let the name and the tracker lead to the newest checkpoint, if a node died before it did
    that.

    Returns what the user should know, or None if the directory must be looked at again later: the
    newest checkpoint is damaged, or has names that this node does not know yet.

    Nothing is removed: of two checkpoints of the step the newer may be damaged, and the job may
    have restored the older. Only the newest step is looked at: other nodes may be removing older
    ones.
    """
    storage = FencedStorage(unfenced, fence)
    found = list_all(storage, series).committed
    if not found:
        return []
    newest, names = found[0], found[0].series(series.directory)
    if (names.tracker, names.tracker_text) != (series.tracker, series.tracker_text):
        return None  # A node that does not know the names yet must not make a second tracker.
    name = series.name(newest.manifest.step)
    if not is_whole(storage, newest):
        if storage.can_rename and (whole := take_nameless(storage, name)) is not None:
            # The text of the tracker leads to it, and it is what the job has restored.
            take_plain_name(unfenced, whole.name, name, whole.manifest.attempt, removes=False)
        return None
    is_named = newest.name == name or not storage.can_rename
    if is_named and _is_told(storage, series, newest):
        return []
    return _mend(storage, unfenced, series, name)


def _mend(storage: Storage, unfenced: Storage, series: Series, name: str) -> list[str]:
    """Let the newest checkpoint of a step have the plain name, and the tracker name the newest.

    Once a directory was taken, the fence must not interrupt this.
    """
    notes: list[str] = []
    taken = take_misnamed(storage, name) if storage.can_rename else None
    if taken is not None:
        storage, attempt = unfenced, taken.manifest.attempt
        notes = take_plain_name(storage, taken.name, name, attempt, removes=False)
    point_tracker(storage, series, unfenced)
    return notes


def _is_told(storage: Storage, series: Series, newest: Committed) -> bool:
    if not series.tracker:
        return True
    return storage.get(series.tracker) == tracker_text(series, newest)


def _is_there(storage: Storage, of_step: list[Committed], name: str, order: CommitOrder) -> bool:
    """Whether the version is one of these, or of those that are there now.

    One look is not enough: it misses a directory that another node is renaming.
    """
    for _ in range(_TRIES):
        if any(one.version == order.version for one in of_step):
            return True
        if not storage.can_rename:
            break
        of_step = list_step(storage, name)
    return False


def _is_committed(storage: Storage, standing: list[Committed], order: CommitOrder) -> bool:
    """Whether this version is there already; RejectedError if a newer one of the step is."""
    for one in standing:
        if one.version > order.version:
            raise RejectedError(
                f"step {order.version.step} of lineage {order.version.lineage} is not committed: "
                f"{storage.full(one.name)} is newer, of lineage {one.version.lineage}"
            )
    return any(one.version == order.version and is_whole(storage, one) for one in standing)


def _manifest_of(series: Series, order: CommitOrder) -> bytes:
    created = datetime.fromtimestamp(wall_clock(), UTC).isoformat(timespec="milliseconds")
    return encode_manifest(make_manifest(series, order, created))


def _check_files(storage: Storage, place: str, order: CommitOrder) -> None:
    """Every file is there with its size; what is there beside them is removed."""
    found = storage.files(place)
    found.pop(MANIFEST, None)
    for file in order.files:
        size = found.pop(file.name, None)
        if size == file.size:
            continue
        state = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
        raise _FilesMissingError(
            f"step {order.version.step} cannot be committed: {storage.full(place)}/{file.name} "
            f"{state}, as seen by the node that commits: is the directory shared between nodes?"
        )
    for name in found:
        storage.remove(f"{place}/{name}")


def _require_files_stay(storage: Storage, place: str, order: CommitOrder) -> None:
    """The manifest may have come while other nodes removed the files: then it is removed too.

    The order matters: a node that removes says so first, and takes that back when nothing is left.
    """
    is_gone = is_going(storage, place)
    found = storage.files(place)
    if is_gone or any(found.get(file.name) != file.size for file in order.files):
        storage.remove(f"{place}/{MANIFEST}")
        raise RejectedError(
            f"step {order.version.step} is not committed: others have removed {storage.full(place)}"
        )


def _has_replaced(storage: Storage, of_step: list[Committed]) -> bool:
    """Remove older checkpoints of a step from a store of objects; False if there was none."""
    older = [one for one in of_step if one.version < of_step[0].version]
    if not older or not is_whole(storage, of_step[0]):
        return False
    for one in older:
        discard(storage, one.name)
    return True


def tracker_text(series: Series, newest: Committed) -> bytes:
    """What the tracker says when this is the newest checkpoint."""
    return _tracker_text(series, newest.name, newest.manifest.step)


def _tracker_text(series: Series, name: str, step: int) -> bytes:
    return filled(series.tracker_text, name=name, step=step).encode()


def point_tracker(
    storage: Storage, series: Series, unfenced: Storage | None = None
) -> list[Committed]:
    """Let the tracker name the newest committed checkpoint; returns all that there are.

    Another node may have committed between the look and the write: so this looks again after a
    write, and then corrects the tracker whatever a fence says. The tracker does not go back from a
    checkpoint that cannot be read now.
    """
    known: dict[str, Manifest] = {}
    for _ in range(_TRIES):
        told = storage.get(series.tracker) if series.tracker else None
        # Last, so that what is returned is there now.
        listing = list_all(storage, series, known=known)
        found = listing.committed
        if not found or not series.tracker:
            return found
        text = tracker_text(series, found[0])
        unread = listing.perhaps_newest()
        if told in {text, *(_tracker_text(series, one.name, one.step) for one in unread)}:
            return found
        storage.put(series.tracker, text)
        storage = unfenced or storage
    raise RetryableError(f"others keep changing {storage.full(series.tracker)}")
