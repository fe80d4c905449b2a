# SPDX-License-Identifier: Apache-2.0
"""Datasets that follow the checkpoints of a directory: marked with every save, set back with it.

Only the restore decides what becomes of their leases, not lost nodes and new rounds: a version that
a lost node has saved may be restored, and its marks may come late.
"""

from collections.abc import Sequence

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Reply
from holdfast.core.job.data.dataset_state import DatasetState
from holdfast.core.job.data.marks import Marks
from holdfast.core.job.data.positions import position
from holdfast.core.job.data.shard_state import ShardState
from holdfast.core.kernel import Outcome
from holdfast.protocol import data as d
from holdfast.protocol import messages as m


class Following:
    """What ranks say of versions that not all ranks have marked yet. Not durable."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._marks: dict[str, Marks] = {}

    def marked(self, out: Outcome, call: ev.DataMarks) -> Sequence[DatasetState]:
        """A node says how far its ranks were; returns the datasets that this changed."""
        body, newest = call.body, self._state.marked(call.body.directory)
        if body.version == newest:
            _reply(out, [call], m.Done())
            return ()
        if body.version < newest:
            later = f"step {newest.step} of {body.directory} was marked or restored since"
            _reply(out, [call], m.Refused("stale", later))
            return ()
        marks = self._marks.setdefault(body.directory, Marks())
        if not marks.add(call):
            return ()
        said, complete, overtaken = marks.take(body.version)
        followers = self._state.followers.get(body.directory, [])
        record = rec.MarksFolded(body.directory, body.version, _uptos(followers, said))
        self._state.commit(out, record, followers)
        positions = tuple(position(dataset) for dataset in followers)
        out.facts.append(ev.VersionMarked(body.directory, body.version, positions))
        _reply(out, complete, m.Done())
        missed = f"step {body.version.step} was marked by every rank before this one was"
        _reply(out, overtaken, m.Refused("stale", missed))
        return followers

    def restored(self, out: Outcome, event: ev.RestoreAgreed) -> Sequence[DatasetState]:
        """The model went to another version; returns the datasets that went with it."""
        directory, state = event.directory, self._state
        if event.fresh:
            # The ranks begin to save, or to save a step again, with the model that they have.
            return ()
        if marks := self._marks.pop(directory, None):
            restored = m.Refused("stale", f"step {event.version.step} was restored since")
            _reply(out, marks.take_all(), restored)
        followers = state.followers.get(directory, ())
        if followers or event.positions or directory in state.restored:
            state.commit(
                out,
                rec.PositionsAdopted(directory, event.lineage, event.positions, event.round),
            )
        for dataset in followers:
            name = dataset.dataset.name
            out.facts.append(ev.DatasetRestored(name, dataset.first_left, dataset.problem))
        return followers


def _uptos(
    followers: Sequence[DatasetState], said: list[d.Mark]
) -> tuple[tuple[str, int, int], ...]:
    """The marks that still count: those of leases that the last restore did not void."""
    terms = {dataset.dataset.name: dataset.term for dataset in followers}
    return tuple(
        (mark.name, consumed.lease, consumed.upto)
        for mark in said
        if terms.get(mark.name) == mark.term
        for consumed in mark.consumed
    )


def _reply(out: Outcome, calls: Sequence[ev.DataMarks], answer: m.Answer) -> None:
    out.commands.extend(Reply(call.link, call.call, answer) for call in calls)
