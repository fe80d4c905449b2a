# SPDX-License-Identifier: Apache-2.0
"""Removes checkpoints that are not wanted any more. It reads from storage every time what is there.

Only directories with a whole manifest of ours under a name of the series are ever touched, and
nothing at all unless the newest checkpoint is complete.
"""

from collections.abc import Collection

from holdfast.checkpoint.commit import point_tracker
from holdfast.checkpoint.manifest import Committed, Listing, list_all, newest_per_step
from holdfast.checkpoint.naming import remove_committed
from holdfast.checkpoint.storage_port import Storage, telling
from holdfast.checkpoint.verify import names_one_of, quick_problems
from holdfast.model.checkpoint import Series
from holdfast.model.errors import RejectedError


def apply_retention(storage: Storage, series: Series) -> list[int]:
    """Remove what the rules of the series do not keep; returns the steps that are gone.

    An older version of a step that is kept is removed too, if the newer one is complete.
    RejectedError when the newest checkpoint is not complete: then no step is removed.
    """
    listing = list_all(storage, series)
    committed = newest_per_step(listing.committed)
    if len(committed) < len(listing.committed):
        _remove_replaced(storage, listing.committed, committed)
    if series.keep_last <= 0:
        return []
    unwanted = _unwanted(storage, series, committed)
    if unwanted:
        _require_newest(storage, listing)
    return _remove(storage, listing.committed, unwanted)


def remove_steps(
    storage: Storage, series: Series, steps: Collection[int], *, newest_too: bool = False
) -> list[int]:
    """Remove these steps, but not the newest, unless told so; returns those that are gone.

    The names of the series may come from a manifest, which any program can have written: a file is
    taken for the tracker, and changed, only if it names a checkpoint that is there.
    """
    listing = list_all(storage, series)
    committed = newest_per_step(listing.committed)
    has_tracker = names_one_of(storage, series, committed)
    chosen = [one for one in committed if one.manifest.step in steps]
    if not newest_too:
        chosen = [one for one in chosen if one is not committed[0]]
        if chosen:
            _require_newest(storage, listing)
    removed = _remove(storage, listing.committed, chosen)
    if removed and has_tracker:
        with telling(f"{storage.full(series.tracker)} could not be changed"):
            if not point_tracker(storage, series):
                storage.remove(series.tracker)
                # A job may have committed between that look and the removal.
                point_tracker(storage, series)
    return removed


def _unwanted(storage: Storage, series: Series, committed: list[Committed]) -> list[Committed]:
    """Those beyond the newest `keep_last` complete ones, except those that are kept for ever."""
    unwanted = []
    kept = 0
    for one in committed:
        if kept < series.keep_last:
            # A damaged one does not count: it could not be restored.
            kept += not quick_problems(storage, one)
        elif series.keep_every <= 0 or one.manifest.step % series.keep_every != 0:
            unwanted.append(one)
    return unwanted


def _require_newest(storage: Storage, listing: Listing) -> None:
    """The newest checkpoint is known and whole, or RejectedError."""
    if unread := listing.perhaps_newest():
        raise RejectedError(
            "nothing is removed, as the newest checkpoint may be one that cannot be read: "
            f"{unread[0].why}: make it readable, or remove it if it is no checkpoint"
        )
    problems = quick_problems(storage, listing.committed[0])
    if problems:
        raise RejectedError(
            f"nothing is removed, as the newest checkpoint is damaged: {problems[0]}"
        )


def _remove_replaced(storage: Storage, found: list[Committed], committed: list[Committed]) -> None:
    """Remove what a node left that gave a newer version its name but was not to remove anything."""
    newest = {one.manifest.step: one for one in committed}
    for one in reversed(found):
        newer = newest[one.manifest.step]
        if one.version < newer.version and not quick_problems(storage, newer):
            with telling(f"{storage.full(one.name)} could not be removed"):
                remove_committed(storage, one)


def _remove(storage: Storage, found: list[Committed], unwanted: list[Committed]) -> list[int]:
    """Remove these, with older ones of the same step that were replaced by them."""
    steps = {one.manifest.step for one in unwanted}
    # The oldest first: whenever this is interrupted, the newest are left.
    for one in reversed(found):
        if one.manifest.step in steps:
            with telling(f"{storage.full(one.name)} could not be removed"):
                remove_committed(storage, one)
    return [one.manifest.step for one in reversed(unwanted)]
