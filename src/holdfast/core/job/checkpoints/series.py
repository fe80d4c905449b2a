# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint ledger knows of one directory, and what it does for it by itself.

Beside the restore agreement and the attempts there are questions that need the holdings of all
nodes: where a part is, what a node that has to go should bring to storage, and which other nodes
have what a lost node left unwritten. They share one *survey* of all nodes that are there.
"""

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.agreement import Agreement
from holdfast.core.job.checkpoints.attempts import Attempts
from holdfast.core.job.checkpoints.checkpoint_state import CheckpointState
from holdfast.core.job.checkpoints.crew import Crew
from holdfast.core.job.checkpoints.gathering import Gathering
from holdfast.core.job.checkpoints.inventory import Inventory
from holdfast.core.job.checkpoints.replication import Replication
from holdfast.core.job.commands import Reply
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.dataset import Position
from holdfast.model.ids import NodeId
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

FLUSH = "the newest state in memory, as a node has to go"


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
        self.replication = Replication(directory, crew)
        #: The versions that each node of the round had in memory when it saved last.
        self._held: dict[NodeId, tuple[Version, ...]] = {}

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
        for gathering in self._gatherings():
            gathering.taken(node_id, body)

    def marked(self, out: Outcome, version: Version, positions: tuple[Position, ...]) -> None:
        """It is known how far the data of this version were: every rank has said so."""
        held = None
        if self._crew.index.keys() <= self._held.keys():
            held = {one for of_node in self._held.values() for one in of_node}
            held |= {self.replication.safe, *self.attempts.versions()}
        self._state.replace_positions(out, self.directory, version, positions, held)

    def note_held(self, node_id: NodeId, versions: tuple[Version, ...]) -> None:
        """A node says what it has in memory: the positions of other versions are not needed."""
        self._held[node_id] = versions

    # ---- nodes and rounds come and go -----------------------------------------------------------

    def node_returned(self, out: Outcome, node_id: NodeId) -> None:
        """The node may have missed what it was told."""
        self.attempts.node_returned(out, node_id)
        for gathering in self._gatherings():
            gathering.ask_again(out, node_id)

    def node_lost(self, out: Outcome, node_id: NodeId) -> None:
        self.attempts.node_lost(out, node_id)
        self.replication.node_lost(node_id)
        if self.agreement is not None:
            self.agreement.withdraw(node_id)
        if self._survey is not None:
            self._survey.lost(node_id)
        self._held.pop(node_id, None)
        self._flushes.pop(node_id, None)
        self._promised.pop(node_id, None)
        self._locates = {key: held for key, held in self._locates.items() if key[0] != node_id}

    def round_over(self, out: Outcome) -> None:
        """A new world has formed: its nodes ask again for what was under way in the old one."""
        self.attempts.round_over(out)
        if self.agreement is not None:
            for call in self.agreement.take_asks():
                stale = m.Refused("stale", "a new round has begun")
                out.commands.append(call.answer(stale))
        self.agreement = self.inventory = None
        self._held.clear()
        self.replication.round_over(out)

    def _gatherings(self) -> list[Gathering]:
        found = [] if self._survey is None else [self._survey]
        return found if self.agreement is None else [*found, self.agreement.outsiders]

    # ---- going on -------------------------------------------------------------------------------

    def advance(self, out: Outcome, now: float) -> None:
        """Decide everything that can be decided by now."""
        if self.inventory is not None:
            self._answer_locates(out, self.inventory, guess=False)
        self._look_around(out, now)
        self.attempts.commit_next(out)
        self.attempts.open_waiting(out, now)
        self._keep_promises(out)

    def _look_around(self, out: Outcome, now: float) -> None:
        wanted = bool(self._flushes or self._locates) or self.attempts.needs_survey
        if self._survey is None and wanted:
            nodes = self._crew.present - self._flushes.keys()
            self._survey = Gathering(self.directory, self._crew.next_number(), nodes, now)
            self._survey.ask(out)
        if self._survey is not None and self._survey.is_over(now):
            survey, self._survey = self._survey, None
            # A node asks to flush once it writes nothing any more.
            held = {**survey.found}
            held.update((node_id, body.holdings) for node_id, (_, body) in self._flushes.items())
            inventory = Inventory(held)
            is_all = held.keys() >= self._crew.present
            self.attempts.adopt_orphans(out, inventory, survey, is_all=is_all)
            self._answer_locates(out, inventory, guess=True)
            self._flush(out, inventory, now)

    def _answer_locates(self, out: Outcome, inventory: Inventory, *, guess: bool) -> None:
        """Tell where parts are; `guess`: parts that are in no memory are taken to be stored."""
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
        unusable: set[Version] = set()
        if self.directory in self._state.followed:
            unusable = inventory.without_position(self._state.positions(self.directory).keys())
        base = self._state.base(self.directory)
        newest = inventory.newest(memory_only=True, base=base, passed_over=unusable)
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
        """Have a version in memory written, unless it or a newer one is stored or being written."""
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
    def promised(self) -> Version:
        """The newest version that a leaving node waits for; NONE if none does."""
        return max((version for _, version in self._promised.values()), default=NONE)

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
            "safe": self.replication.newest_safe.step,
            "safe_confirmed": self.replication.is_confirmed,
            "writing": -1 if attempt is None else attempt.version.step,
            "reason": "" if attempt is None else attempt.reason,
            "problem": self.attempts.problem,
            "copy_problem": self.replication.problem,
        }
