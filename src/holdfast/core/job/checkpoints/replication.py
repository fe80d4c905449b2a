# SPDX-License-Identifier: Apache-2.0
"""Which version every node has copied to others, and what follows when a copy fails.

Each node copies one version after the other. It reports each one that it has copied. The report is
answered when that version is *safe*: every node of the round has copied it. So all nodes wait for
the same version, and for no other: a node that has copied a newer one has skipped it.

A node whose copy failed says so at once. It gets another peer for the rest of the round, or the
version is given up and no node waits for it any longer; what was safe before stays safe.
"""

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.crew import Crew
from holdfast.core.job.commands import Reply
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.ids import NodeId
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

PASSED_OVER_MAX = 4
"""How many peers may fail a node before it goes without copies: often none of them has room."""


class Replication:
    """The copies of one directory in the present round. Nothing here is durable."""

    def __init__(self, directory: str, crew: Crew) -> None:
        self._directory = directory
        self._crew = crew
        self.safe = NONE
        #: The last version that was safe in an earlier round; the next one may restore it.
        self._was_safe = NONE
        #: Whether the ranks have agreed on a version: copies from before that matter no more.
        self._is_restored = False
        #: Why the newest version has no copies; empty while all is well.
        self.problem = ""
        #: The version that is being waited for, and the requests of nodes that have copied it.
        self._version = NONE
        self._waiting: dict[NodeId, ev.CheckpointRequested] = {}
        #: This version and all before it are not waited for.
        self._given_up = NONE
        #: The peers with which a node's copies failed in this round.
        self._passed_over: dict[NodeId, set[NodeId]] = {}

    def replicated(self, out: Outcome, request: ev.CheckpointRequested, body: c.Replicated) -> None:
        """A node has copied its parts; answered once the version is safe, or will not be."""
        version = body.version
        if version == self.safe:
            out.commands.append(_answer(request, m.Done()))
            return
        if self._is_over(version):
            why = self.problem or "another node has skipped it"
            refusal = f"step {version.step} is not waited for any more: {why}"
            out.commands.append(_answer(request, m.Refused("rejected", refusal)))
            return
        if version > self._version:
            why = f"{self._name(request.node_id)} has skipped step {self._version.step}"
            self._answer_all(out, m.Refused("rejected", why))
            self._version = version
        self._waiting[request.node_id] = request
        if len(self._waiting) == len(self._crew.index):
            self._answer_all(out, m.Done())
            self.safe = version
            if self.problem:
                self.problem = ""
                out.facts.append(ev.CopiesResumed(self._directory, version))

    def failed(self, out: Outcome, node_id: NodeId, body: c.CopyFailed) -> c.Peers:
        """The peers that get this node's copies from now on; if empty, it goes on without."""
        if self._is_over(body.version) or body.version == self.safe:
            return c.Peers(())
        peers = self._other_peers(node_id, body)
        what = f"{self._name(node_id)} could not copy step {body.version.step}"
        if body.peer >= 0:
            what += f" to {self._name(NodeId(body.peer))}"
        if peers:
            ranks = ", ".join(str(self._crew.node_rank(NodeId(peer.node_id))) for peer in peers)
            told = f"{what}, its copies go to node rank {ranks} from now on: {body.problem}"
            out.facts.append(ev.CopyFailed(self._directory, body.version, told))
        else:
            self._give_up(out, body.version, f"{what}: {body.problem}")
        return c.Peers(peers)

    def node_lost(self, node_id: NodeId) -> None:
        self._waiting.pop(node_id, None)

    def round_over(self, out: Outcome) -> None:
        """Other nodes are there now: copies of the last round do not count."""
        self._answer_all(out, m.Refused("stale", "a new round has begun"))
        self._was_safe = self.newest_safe
        self.safe = self._version = self._given_up = NONE
        self.problem = ""
        self._passed_over.clear()

    def restored(self, version: Version) -> None:
        """All ranks go on from this version: a newer one from an earlier round is void."""
        self._is_restored = True
        if version < self._was_safe:
            self._was_safe = NONE

    @property
    def newest_safe(self) -> Version:
        """For people: the newest version that is safe, or that was safe before an incident."""
        return max(self.safe, self._was_safe)

    @property
    def is_confirmed(self) -> bool:
        """Whether `newest_safe` holds now, and not only before an incident or a restart."""
        if self.newest_safe == NONE:
            return self._is_restored or not self._crew.began_with_world
        return self.safe == self.newest_safe

    def _is_over(self, version: Version) -> bool:
        return version < self._version or version <= self._given_up

    def _other_peers(self, node_id: NodeId, body: c.CopyFailed) -> tuple[c.Peer, ...]:
        passed_over = self._passed_over.setdefault(node_id, set())
        passed_over.add(NodeId(body.peer))
        peers: tuple[c.Peer, ...] = ()
        if len(passed_over) <= PASSED_OVER_MAX:
            ring = self._crew.ring
            peers = self._crew.peers(ring.replica_peers(node_id, body.replicas, passed_over))
        if not peers:
            # With the next version all of them are tried again.
            del self._passed_over[node_id]
        return peers

    def _give_up(self, out: Outcome, version: Version, why: str) -> None:
        self._given_up = version
        if self._version <= version:
            self._answer_all(out, m.Refused("rejected", why))
        if not self.problem:
            told = f"{why}; training goes on without, and step {self.safe.step} stays safe"
            if self.safe == NONE:
                told = f"{why}; training goes on without"
            out.facts.append(ev.CopyFailed(self._directory, version, told))
        self.problem = why

    def _answer_all(self, out: Outcome, answer: m.Answer) -> None:
        for request in self._waiting.values():
            out.commands.append(_answer(request, answer))
        self._waiting.clear()

    def _name(self, node_id: NodeId) -> str:
        return f"node rank {self._crew.node_rank(node_id)}"


def _answer(request: ev.CheckpointRequested, answer: m.Answer) -> Reply:
    return Reply(request.link, request.call, answer)
