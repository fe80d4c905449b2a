# SPDX-License-Identifier: Apache-2.0
"""Bringing versions of one directory to storage: which node writes what, and when to commit.

An attempt has a name of its own and a fixed set of parts. It is committed once each of those parts
has been reported *for that attempt*, and never because of how many files or reports there are. One
node then gives the checkpoint its name. Whatever goes wrong ends the attempt, and nothing else.

Nothing here is durable. An attempt that an earlier master opened goes on with what its
writers report: all of their calls are held until the end, and are sent again to a new master.
"""

from collections.abc import Iterator

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.checkpoints.attempt import AttemptState, writer_of
from holdfast.core.job.checkpoints.checkpoint_state import CheckpointState
from holdfast.core.job.checkpoints.crew import Crew
from holdfast.core.job.checkpoints.gathering import Gathering
from holdfast.core.job.checkpoints.inventory import Inventory
from holdfast.core.job.checkpoints.persist_queue import PersistQueue, superseded
from holdfast.core.job.commands import Push, Reply
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import SHARED, Shape, Version
from holdfast.model.ids import NodeId
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

SILENCE_S = 3600.0
"""An attempt is given up when nothing is heard of it for this long."""

RESUMED_S = 600.0
"""The same for an attempt of an earlier master: this one does not know which nodes still write."""


NO_POSITION = "not every rank has said how far its data were when it was saved"


class Attempts:
    """The open attempts of one directory, and the step that waits for its turn."""

    def __init__(self, directory: str, crew: Crew, state: CheckpointState) -> None:
        self._directory = directory
        self._crew = crew
        self._state = state
        self._open: dict[str, AttemptState] = {}
        self._queue = PersistQueue(crew)
        #: Attempts of an earlier master that are known to be committed.
        self._done_before: set[str] = set()
        #: Attempts of an earlier master that this one gave up: a late report does not open them.
        self._given_up: set[str] = set()
        #: Why the last attempt failed; empty after a commit.
        self.problem = ""

    def validate(self) -> None:
        """One attempt is committed at a time, only a whole one; none is older than a commit."""
        committed = self._state.newest(self._directory)
        named = [attempt for attempt in self._open.values() if attempt.committer is not None]
        assert len(named) <= 1, named
        assert not any(attempt.missing for attempt in named), named
        for attempt in self._open.values():
            assert attempt.version >= committed, (attempt, committed)
            assert attempt.orphans <= attempt.missing, attempt
            assert attempt.writers.keys() <= attempt.missing, attempt
            assert attempt.orphans.isdisjoint(attempt.writers), attempt

    # ---- what others want to know ---------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @property
    def needs_survey(self) -> bool:
        """Whether it matters which node holds which part."""
        is_known = not self._crew.absent
        return any(
            attempt.orphans or (attempt.is_unclear and attempt.missing and is_known)
            for attempt in self._open.values()
        )

    def newest_open(self) -> AttemptState | None:
        return max(self._open.values(), key=lambda attempt: attempt.version, default=None)

    def versions(self) -> Iterator[Version]:
        """What is on its way to storage."""
        return (attempt.version for attempt in self._open.values())

    def deadline(self) -> float | None:
        return min((attempt.until for attempt in self._open.values()), default=None)

    # ---- beginning ------------------------------------------------------------------------------

    def ask(self, out: Outcome, request: ev.CheckpointRequested, body: c.PersistAsk) -> None:
        """A node holds its parts of a step that is to go to storage."""
        for attempt in self._open.values():
            if attempt.version == body.version:
                self._plan(out, attempt, request, body.parts)
                return
        newest = max(self._queue.version, self._state.newest(self._directory))
        if body.version < newest:
            out.commands.append(superseded(request, newest))
        else:
            self._queue.add(out, request, body)

    def open_waiting(self, out: Outcome, now: float) -> None:
        """Begin with the step that waits, once nothing else is open and all of it is there."""
        whole = None if self._open else self._queue.whole()
        if whole is None:
            return
        shape, writers = whole
        version, why = self._queue.version, "the program saved it"
        if self._state.lacks_position(self._directory, version):
            # Every node says how far its data were before it asks: nothing more will come.
            self.problem = f"step {version.step} did not reach storage: {NO_POSITION}"
            self._queue.refuse(out, m.Refused("rejected", NO_POSITION))
            return
        attempt = self._begin(out, version, shape, why, writers, now)
        self._plan_for_waiting(out, attempt)

    def begin_ordered(
        self, out: Outcome, version: Version, inventory: Inventory, reason: str, now: float
    ) -> bool:
        """Have the nodes that hold a version write it; False if they do not hold enough of it."""
        shape = inventory.shape(version)
        writers: dict[str, NodeId] = {}
        loads: dict[NodeId, int] = {}
        for part in shape.parts():
            writer = writer_of(part, inventory.holders(version, part), self._crew, loads)
            if writer is not None:
                writers[part] = writer
            elif part == SHARED or not shape.shared:
                return False
        if set(writers) == {SHARED}:
            return False  # No rank's part could stand in for those that are lost.
        attempt = self._begin(out, version, shape, reason, writers, now)
        out.commands.extend(attempt.order_parts(self._directory, writers))
        self._plan_for_waiting(out, attempt)
        return True

    def _begin(
        self,
        out: Outcome,
        version: Version,
        shape: Shape,
        reason: str,
        writers: dict[str, NodeId],
        now: float,
    ) -> AttemptState:
        name, until = self._crew.new_attempt(), now + SILENCE_S
        attempt = AttemptState(name, version, shape, reason, until, set(writers), writers)
        self._open[name] = attempt
        out.facts.append(ev.AttemptOpened(self._directory, version, name, reason))
        return attempt

    def _plan_for_waiting(self, out: Outcome, attempt: AttemptState) -> None:
        for request, body in self._queue.take(attempt.version):
            self._plan(out, attempt, request, body.parts)

    def _plan(
        self,
        out: Outcome,
        attempt: AttemptState,
        request: ev.CheckpointRequested,
        parts: tuple[str, ...],
    ) -> None:
        """Tell a node which of its parts it writes: the same, however often it asks."""
        is_first = self._crew.index.get(request.node_id) == 0
        mine = attempt.share_of(request.node_id, parts, is_first=is_first)
        plan = c.PersistPlan(attempt.attempt, mine)
        out.commands.append(Reply(request.link, request.call, plan))

    # ---- reports and the commit -----------------------------------------------------------------

    def persisted(
        self, out: Outcome, request: ev.CheckpointRequested, body: c.PartsPersisted, now: float
    ) -> None:
        """Parts are on storage, or will not be."""
        last = self._state.committed.get(self._directory)
        if last is not None and (body.attempt == last.attempt or body.version < last.version):
            out.commands.append(Reply(request.link, request.call, c.PersistState(last.version)))
            return
        attempt = self._open.get(body.attempt)
        if attempt is None and self._is_over(body.attempt):
            why = self.problem or "the attempt is over"
            out.commands.append(Reply(request.link, request.call, m.Refused("rejected", why)))
            return
        if attempt is None:
            # An earlier master opened it: it goes on.
            attempt = self._open[body.attempt] = AttemptState.resumed(body)
            self._plan_for_waiting(out, attempt)
        key = (request.node_id, body.parts)
        attempt.held[key] = request
        attempt.until = now + (RESUMED_S if attempt.is_resumed else SILENCE_S)
        if body.problem:
            # A part that another node has written is not missing: a lost node's report may be late.
            if not attempt.missing.isdisjoint(body.parts):
                self._give_up(out, attempt, body.problem)
        elif body.attempt in self._done_before:
            self._committed(out, attempt)
        else:
            attempt.reported(key, body.files)

    def _is_over(self, name: str) -> bool:
        """Whether an attempt that is not open never will be: this master named it, or gave it up
        and knows of no commit of it."""
        if self._crew.is_ours(name):
            return True
        return name in self._given_up and name not in self._done_before

    def commit_next(self, out: Outcome) -> None:
        """Have the oldest whole attempt committed. One at a time: the newest name is the last."""
        if any(attempt.committer is not None for attempt in self._open.values()):
            return
        whole = [attempt for attempt in self._open.values() if not attempt.missing]
        for attempt in sorted(whole, key=lambda one: one.version):
            if twice := attempt.named_twice():
                self._give_up(out, attempt, f"two nodes wrote a file {twice!r}")
                continue
            if self._state.lacks_position(self._directory, attempt.version):
                self._give_up(out, attempt, NO_POSITION)
                continue
            if not attempt.held:
                self._give_up(out, attempt, "all nodes that wrote it were lost")
                continue
            here = [node_id for node_id, _ in attempt.held if node_id in self._crew.present]
            if here:
                attempt.committer = min(here, key=self._crew.place)
                out.commands.append(self._commit_order(attempt, attempt.committer))
                return

    def _commit_order(self, attempt: AttemptState, committer: NodeId) -> Push:
        positions = self._state.positions(self._directory).get(attempt.version, ())
        return Push(committer, attempt.commit_order(self._directory, positions))

    def commit_done(self, out: Outcome, node_id: NodeId, body: c.CommitDone) -> None:
        """A node gave a checkpoint its name, or could not."""
        attempt = self._open.get(body.attempt)
        if attempt is not None and body.problem:
            # The failure of a node that is not the committer any more changes nothing.
            if attempt.committer == node_id:
                self._give_up(out, attempt, body.problem)
        elif attempt is not None:
            self._committed(out, attempt)
        elif not body.problem and not self._crew.is_ours(body.attempt):
            # Only whole attempts are ever committed. The shape comes with the reports.
            self._done_before.add(body.attempt)

    def _committed(self, out: Outcome, attempt: AttemptState) -> None:
        del self._open[attempt.attempt]
        self._done_before.discard(attempt.attempt)
        directory, version, name = self._directory, attempt.version, attempt.attempt
        record = rec.CheckpointCommitted(directory, version, name, attempt.shape)
        self._state.commit(out, record)
        out.facts.append(ev.CheckpointCommitted(directory, version, name))
        for request in attempt.held.values():
            out.commands.append(Reply(request.link, request.call, c.PersistState(version)))
        self._queue.refuse_before(out, version)
        for older in [one for one in self._open.values() if one.version < version]:
            self._give_up(out, older, f"superseded by step {version.step}")
        self.problem = ""

    def _give_up(self, out: Outcome, attempt: AttemptState, why: str) -> None:
        """End an attempt; nothing that was committed before is touched."""
        del self._open[attempt.attempt]
        if not self._crew.is_ours(attempt.attempt):
            self._given_up.add(attempt.attempt)
        self.problem = f"step {attempt.version.step} did not reach storage: {why}"
        out.facts.append(ev.AttemptFailed(self._directory, attempt.version, attempt.attempt, why))
        for request in attempt.held.values():
            refusal = m.Refused("rejected", self.problem)
            out.commands.append(Reply(request.link, request.call, refusal))

    def expire(self, out: Outcome, now: float) -> None:
        """Give up what nothing was heard of for too long."""
        for attempt in [one for one in self._open.values() if one.until <= now]:
            what = min(attempt.missing, default="the commit")
            self._give_up(out, attempt, f"nothing was heard of {what} for too long")

    # ---- nodes and rounds come and go -----------------------------------------------------------

    def node_lost(self, out: Outcome, node_id: NodeId) -> None:
        self._queue.withdraw(node_id)
        for attempt in list(self._open.values()):
            attempt.abandoned(node_id)
            if attempt.is_resumed and attempt.missing:
                self._give_up(out, attempt, "a node was lost that may have been writing it")

    def node_returned(self, out: Outcome, node_id: NodeId) -> None:
        """The node may have missed what it was told."""
        for attempt in self._open.values():
            for key in [key for key in attempt.orders if key[0] == node_id]:
                out.commands.append(attempt.order(self._directory, key))
            if attempt.committer == node_id:
                out.commands.append(self._commit_order(attempt, node_id))

    def adopt_orphans(
        self, out: Outcome, inventory: Inventory, survey: Gathering, *, is_all: bool
    ) -> None:
        """Have other nodes write what lost nodes left unwritten, where there is a copy.

        `is_all`: the survey covers every node, so it shows every part that is being written.
        """
        for attempt in [one for one in self._open.values() if one.is_unclear]:
            attempt.is_unclear = bool(self._crew.absent)
            if is_all and not attempt.is_unclear:
                attempt.find_orphans(inventory, survey)
        for attempt in [one for one in self._open.values() if one.orphans]:
            adopted, lost = attempt.adopt_orphans(inventory, self._crew)
            if lost:
                self._give_up(out, attempt, f"{lost} was lost with its node")
            else:
                out.commands.extend(attempt.order_parts(self._directory, adopted))

    def round_over(self, out: Outcome) -> None:
        """Refuse what the last world asked for and had not begun."""
        self._queue.refuse(out, m.Refused("stale", "the round in which this was asked is over"))
