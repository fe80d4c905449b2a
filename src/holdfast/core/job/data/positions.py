# SPDX-License-Identifier: Apache-2.0
"""The position of a dataset: told to others, adopted from a checkpoint, kept in a snapshot."""

from collections.abc import Iterator

from msgspec.structs import replace

from holdfast.core.job import records as rec
from holdfast.core.job.data.dataset_state import DatasetState, LeaseState, lowest_last
from holdfast.model.dataset import LISTED, Piece, Position

NAMES_MAX = 10_000
"""Names of listed shards in one record of a snapshot: a journal's entry has a limit."""


def position(state: DatasetState) -> Position:
    """What is consumed: in the newest marked version if the dataset follows checkpoints, or else as
    the workers reported it."""
    rests = [
        Piece(
            lease.piece.epoch,
            lease.piece.extent,
            lease.marked if state.dataset.series else lease.reported,
            lease.piece.end,
        )
        for lease in state.leases.values()
    ]
    pieces, first_listed = sorted([*state.open, *rests]), state.cutter.first_listed
    if state.dataset.kind == LISTED and state.dataset.epochs == 1:
        # Names of shards that are not needed again are not carried along.
        first_listed = min([*state.cutter.cut, *(piece.extent for piece in pieces[:1])])
    return _position(state, pieces, first_listed)


def _position(state: DatasetState, pieces: list[Piece], first_listed: int) -> Position:
    cutter = state.cutter
    return Position(
        state.dataset.name,
        cutter.epoch,
        tuple(cutter.cut),
        tuple(pieces),
        tuple(state.aside),
        tuple(cutter.listed[first_listed - cutter.first_listed :]),
        first_listed,
        cutter.is_listed,
        state.recipe,
    )


def summary(state: DatasetState) -> Position:
    """For a worker that opens the dataset: where it goes on, and how many listed shards are named.

    Open pieces are not in it: thousands of workers open a dataset, and each would get all of them.
    """
    cutter = state.cutter
    is_next = state.first_left > cutter.epoch
    return Position(
        state.dataset.name,
        state.first_left,
        (0,) * len(cutter.cut) if is_next else tuple(cutter.cut),
        first_listed=cutter.named,
        is_listed=cutter.is_listed,
        recipe=state.recipe,
    )


def adopt(state: DatasetState, wanted: Position | None, round_number: int) -> None:
    """Set the dataset to that position; None: to its very beginning.

    The models of round `round_number` are there too.
    """
    state.term += 1
    state.round = round_number
    state.leases, state.live, state.failures = {}, {}, {}
    state.open, state.aside, state.problem = [], {}, ""
    cutter = state.cutter
    if wanted is not None and not _is_of(state, wanted):
        state.problem = (
            f"the checkpoint has dataset {state.dataset.name!r} cut by "
            f"{wanted.recipe or 'something else'}, and it is now cut by {state.recipe}"
        )
        wanted = None
    if wanted is None:
        if cutter.first_listed:
            # Names from the beginning are not known here: the user has to say them again.
            cutter.listed, cutter.first_listed, cutter.is_listed = [], 0, False
        cutter.begin(0)
        return
    state.open = sorted(wanted.open, key=lowest_last)
    state.aside = dict.fromkeys(wanted.aside, "")
    _adopt_names(state, wanted)
    cutter.begin(wanted.epoch, wanted.cut)


def _is_of(state: DatasetState, wanted: Position) -> bool:
    is_same = wanted.recipe in ("", state.recipe)
    return is_same and state.cutter.is_cut_by(wanted.cut)


def _adopt_names(state: DatasetState, wanted: Position) -> None:
    """What was named after the position was taken stays named."""
    cutter, named = state.cutter, wanted.first_listed + len(wanted.listed)
    is_known = cutter.first_listed <= wanted.first_listed <= named <= cutter.named
    if not is_known:
        cutter.listed, cutter.first_listed = list(wanted.listed), wanted.first_listed
    cutter.is_listed = wanted.is_listed or (is_known and cutter.is_listed)


def keep(state: DatasetState) -> Iterator[rec.DatasetKept | rec.ShardsListed]:
    """Everything about a dataset, for a snapshot; no record with more than NAMES_MAX names."""
    leases = tuple(
        rec.LeaseKept(
            lease.number,
            lease.piece,
            lease.node_id,
            lease.scope,
            lease.failures,
            lease.reported,
            lease.marked,
            lease.is_live,
        )
        for lease in state.leases.values()
    )
    whole = _position(state, sorted(state.open), state.cutter.first_listed)
    yield rec.DatasetKept(
        state.dataset,
        state.term,
        replace(whole, listed=whole.listed[:NAMES_MAX]),
        state.next_lease,
        leases,
        tuple(sorted(state.failures.items())),
        tuple(state.aside.values()),
        state.problem,
        state.round,
        tuple(state.cutter.ends),
    )
    for begin in range(NAMES_MAX, len(whole.listed), NAMES_MAX):
        names = whole.listed[begin : begin + NAMES_MAX]
        yield rec.ShardsListed(state.dataset.name, whole.first_listed + begin, names)


def restored(kept: rec.DatasetKept) -> DatasetState:
    """A dataset from a snapshot."""
    state = DatasetState(kept.dataset)
    state.cutter.grow(kept.ends)
    adopt(state, kept.position, kept.round)
    state.term, state.next_lease, state.problem = kept.term, kept.next_lease, kept.problem
    state.failures = dict(kept.failures)
    state.aside = dict(zip(kept.position.aside, kept.reasons, strict=True))
    for lease in kept.leases:
        state.hold(
            LeaseState(
                lease.number,
                lease.piece,
                lease.node_id,
                lease.scope,
                lease.failures,
                lease.reported,
                lease.marked,
                lease.is_live,
            )
        )
    return state
