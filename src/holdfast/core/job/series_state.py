# SPDX-License-Identifier: Apache-2.0
"""What the ledger knows of one directory, and what it does about it by itself.

Beside the restore agreement and the attempts there are questions that need everybody's holdings:
where a part is, what a node that has to go should bring to storage, and who else has what a
lost node left unwritten. They share one *survey* of all nodes that are there.
"""

from holdfast.core.job import events as ev
from holdfast.core.job.agreement import Agreement
from holdfast.core.job.attempts import Attempts
from holdfast.core.job.checkpoint_state import CheckpointState
from holdfast.core.job.commands import Push, Reply
from holdfast.core.job.crew import Crew
from holdfast.core.job.gathering import Gathering
from holdfast.core.job.inventory import Inventory
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.ids import NodeId
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

FLUSH = "the newest state in memory, as a node has to go"

UNSAFE_MAX = 8
"""So many versions are remembered that some nodes have copied to others and some have not."""


class SeriesState:
    """One directory. Nothing here is durable; `state` is shared by all directories."""

    def __init__(self, directory: str, crew: Crew, state: CheckpointState) -> None:
        self.directory = directory
        self._crew = crew
        self._state = state
        self.attempts = Attempts(directory, crew, state)
        self.agreement: Agreement | None = None
        #: What was where in the last turn of this round's agreement.
        self.inventory: Inventory | None = None
        self._survey: Gathering | None = None
        self._locates: dict[tuple[NodeId, c.PartsLocate], ev.CheckpointRequested] = {}
        self._flushes: dict[NodeId, tuple[ev.CheckpointRequested, c.FlushAsk]] = {}
        #: Flushes that wait for a version to be committed.
        self._promised: dict[NodeId, tuple[ev.CheckpointRequested, Version]] = {}
        self._copied: dict[Version, set[NodeId]] = {}
        self._safe = NONE

    # ---- what nodes ask and tell ----------------------------------------------------------------

    def locate(self, request: ev.CheckpointRequested, body: c.PartsLocate) -> None:
        self._locates[request.node_id, body] = request

    def flush(self, request: ev.CheckpointRequested, body: c.FlushAsk) -> None:
        promised = self._promised.get(request.node_id)
        if promised is not None:
            self._promised[request.node_id] = (request, promised[1])
        else:
            self._flushes[request.node_id] = (request, body)

    def inventory_taken(self, node_id: NodeId, body: c.InventoryTaken) -> None:
        if self._survey is not None:
            self._survey.taken(body.number, node_id, body.holdings)
        if self.agreement is not None:
            self.agreement.outsiders.taken(body.number, node_id, body.holdings)

    def replicated(self, out: Outcome, node_id: NodeId, body: c.Replicated) -> None:
        """A version is safe when every node of the round has copied its parts to others."""
        if not self._crew.is_current(node_id, body.round) or body.version <= self._safe:
            return
        copied = self._copied.setdefault(body.version, set())
        copied.add(node_id)
        if copied >= self._crew.index.keys():
            self._safe = body.version
            for member in sorted(self._crew.index.keys() & self._crew.present):
                out.commands.append(Push(member, c.VersionSafe(self.directory, body.version)))
            self._copied = {v: who for v, who in self._copied.items() if v > body.version}
        while len(self._copied) > UNSAFE_MAX:
            del self._copied[min(self._copied)]

    # ---- nodes and rounds come and go -----------------------------------------------------------

    def node_returned(self, out: Outcome, node_id: NodeId) -> None:
        """The node may have missed what it was told."""
        self.attempts.node_returned(out, node_id)
        for gathering in self._gatherings():
            gathering.ask_again(out, node_id)
        if self._safe != NONE and node_id in self._crew.index:
            out.commands.append(Push(node_id, c.VersionSafe(self.directory, self._safe)))

    def node_lost(self, out: Outcome, node_id: NodeId) -> None:
        self.attempts.node_lost(out, node_id)
        if self.agreement is not None:
            self.agreement.withdraw(node_id)
        if self._survey is not None:
            self._survey.lost(node_id)
        self._flushes.pop(node_id, None)
        self._promised.pop(node_id, None)
        self._locates = {key: held for key, held in self._locates.items() if key[0] != node_id}

    def round_over(self, out: Outcome) -> None:
        """A new world has formed: what was under way in the old one is asked anew."""
        self.attempts.round_over(out)
        if self.agreement is not None:
            for call in self.agreement.take_asks():
                stale = m.Refused("stale", "a new round has begun")
                out.commands.append(call.answer(stale))
        self.agreement = self.inventory = None
        self._copied.clear()
        self._safe = NONE

    def _gatherings(self) -> list[Gathering]:
        found = [] if self._survey is None else [self._survey]
        return found if self.agreement is None else [*found, self.agreement.outsiders]

    # ---- going on -------------------------------------------------------------------------------

    def advance(self, out: Outcome, now: float) -> None:
        """Whatever can be decided by now is."""
        if self.inventory is not None:
            self._answer_locates(out, self.inventory, guess=False)
        self._look_around(out, now)
        self.attempts.commit_next(out)
        self.attempts.open_waiting(out, now)
        self._keep_promises(out)

    def _look_around(self, out: Outcome, now: float) -> None:
        wanted = bool(self._flushes or self._locates) or self.attempts.has_orphans
        if self._survey is None and wanted:
            nodes = self._crew.present - self._flushes.keys()
            self._survey = Gathering(self.directory, self._crew.next_number(), nodes, now)
            self._survey.ask(out)
        if self._survey is not None and self._survey.is_over(now):
            held = {**self._survey.found}
            held.update((node_id, body.holdings) for node_id, (_, body) in self._flushes.items())
            self._survey = None
            inventory = Inventory(held)
            self.attempts.adopt_orphans(out, inventory)
            self._answer_locates(out, inventory, guess=True)
            self._flush(out, inventory, now)

    def _answer_locates(self, out: Outcome, inventory: Inventory, *, guess: bool) -> None:
        """Tell where parts are; `guess` when nobody has looked at the storage."""
        for (node_id, body), request in self._locates.items():
            sources = inventory.sources(body.version, body.parts, node_id, self._crew)
            if guess:
                found = {source.asked for source in sources}
                missing = (part for part in body.parts if part not in found)
                sources += tuple(c.Source(part, part, "storage") for part in missing)
            out.commands.append(Reply(request.link, request.call, c.PartsLocated(sources)))
        self._locates.clear()

    def _flush(self, out: Outcome, inventory: Inventory, now: float) -> None:
        flushes, self._flushes = self._flushes, {}
        if not flushes:
            return
        newest = inventory.newest(memory_only=True, base=self._state.base(self.directory))
        known = [body.committed for _, body in flushes.values()]
        committed = max(self._state.newest(self.directory), *known)
        if newest > committed:
            self.bring_to_storage(out, newest, inventory, FLUSH, now)
            self._promised.update((n, (request, newest)) for n, (request, _) in flushes.items())
            return
        for request, _ in flushes.values():
            answer: m.Answer = c.PersistState(committed)
            if committed == NONE:
                answer = m.Refused("rejected", "no version is whole in memory: nothing to keep")
            out.commands.append(Reply(request.link, request.call, answer))

    def bring_to_storage(
        self, out: Outcome, version: Version, inventory: Inventory, reason: str, now: float
    ) -> None:
        """Have a version that is in memory written, unless it or a newer one is or will be."""
        under_way = self.attempts.newest_open()
        if version <= self._state.newest(self.directory) or inventory.is_stored(version):
            return
        if under_way is None or under_way.version < version:
            self.attempts.begin_ordered(out, version, inventory, reason, now)

    def _keep_promises(self, out: Outcome) -> None:
        committed, under_way = self._state.newest(self.directory), self.attempts.newest_open()
        for node_id, (request, version) in list(self._promised.items()):
            if committed >= version:
                answer: m.Answer = c.PersistState(committed)
            elif under_way is None or under_way.version < version:
                problem = self.attempts.problem or "nobody here holds all of it"
                answer = m.Refused("rejected", problem)
            else:
                continue
            del self._promised[node_id]
            out.commands.append(Reply(request.link, request.call, answer))

    # ---- looking --------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way to storage."""
        return self.attempts.is_open or bool(self._flushes or self._promised)

    def deadline(self) -> float | None:
        found = [self.attempts.deadline()]
        if self._survey is not None:
            found.append(self._survey.deadline())
        if self.agreement is not None and self.agreement.is_waiting(self._crew.index):
            found.append(self.agreement.outsiders.deadline())
        return min((at for at in found if at is not None), default=None)

    def view(self) -> dict[str, object]:
        """The directory as people see it."""
        attempt = self.attempts.newest_open()
        return {
            "directory": self.directory,
            "committed": self._state.newest(self.directory).step,
            "safe": self._safe.step,
            "writing": -1 if attempt is None else attempt.version.step,
            "reason": "" if attempt is None else attempt.reason,
            "problem": self.attempts.problem,
        }
