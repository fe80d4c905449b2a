# SPDX-License-Identifier: Apache-2.0
"""The restore agreement of one directory: every rank gets the same version, or no rank gets any.

It goes in turns. In each, every node of the round says what it holds and what it has at hand; the
newest whole version is chosen, and it is agreed on once every node has it at hand. A copy that
turns out bad on the way is never counted again, so another turn chooses another copy, or an
older version. What the nodes cannot fetch from each other may be on its way to storage: then the
turn waits for that, before it chooses anything older. Nothing here is durable: the asks hold
everything and are sent again to a new master.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.gathering import Gathering
from holdfast.core.job.checkpoints.inventory import NOTES_MAX, Inventory
from holdfast.core.job.commands import Reply
from holdfast.model.checkpoint import NONE, Stored, Version
from holdfast.model.dataset import Position
from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import BadCopy, NodeRestore

TURNS_MAX = 5
"""A version that was planned this often and is still not at hand everywhere is passed over."""


@dataclass(frozen=True, slots=True)
class RestoreCall:
    """A node's ask, and where its answer goes."""

    request: ev.CheckpointRequested
    body: NodeRestore

    def answer(self, body: m.Answer) -> Reply:
        return Reply(self.request.link, self.request.call, body)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a turn came to."""

    version: Version
    go: bool
    fresh: bool
    notes: tuple[str, ...]


class Agreement:
    """The nodes of one round on their way to a common version."""

    def __init__(self, outsiders: Gathering) -> None:
        #: What nodes without a place in the world hold.
        self.outsiders = outsiders
        self._asks: dict[NodeId, RestoreCall] = {}
        self._bad: set[BadCopy] = set()
        #: How often a version was planned: while it was only in memory, and once it was stored.
        self._planned: Counter[tuple[Version, bool]] = Counter()
        #: Versions for which it is not known how far the data were.
        self._unpositioned: set[Version] = set()
        #: What was where in the last turn.
        self.inventory = Inventory({})

    def ask(self, call: RestoreCall) -> None:
        """A node asks; when it asks again in a turn, only the newest ask is answered."""
        self._asks[call.request.node_id] = call
        self._bad.update(call.body.bad)

    def withdraw(self, node_id: NodeId) -> None:
        self._asks.pop(node_id, None)
        self.outsiders.lost(node_id)

    def is_complete(self, members: Collection[NodeId], now: float) -> bool:
        """Whether all members have asked, and the outsiders have answered or had their time."""
        return len(self._asks) == len(members) and self.outsiders.is_over(now)

    def is_waiting(self, members: Collection[NodeId]) -> bool:
        """Whether only the nodes outside the world are waited for."""
        return len(self._asks) == len(members)

    def disagreement(self) -> str:
        """Why the asks do not fit together; empty if they do."""
        bodies = [call.body for call in self._asks.values()]
        if len({body.fresh for body in bodies}) > 1:
            return "some nodes call load and others save first: every rank must do the same"
        steps = sorted({body.step for body in bodies})
        if len(steps) > 1:
            named = ", ".join("the newest" if step < 0 else str(step) for step in steps)
            return f"the nodes want to load different steps: {named}"
        return ""

    def choose(
        self,
        committed: Stored | None,
        base: Version,
        positioned: Collection[Version] | None,
        promised: Version,
        under_way: Collection[Version],
    ) -> Choice | None:
        """The version of this turn, and whether every node has it at hand; None: not yet.

        `base` is the version of the last agreement. Of versions that are only in memory, only the
        `positioned` ones count; None: no dataset follows the directory. The versions `under_way`
        are on their way to storage. A node that has to go waits until `promised` is there.
        """
        bodies = [call.body for call in self._asks.values()]
        # Not a set, which would have another order in each process.
        stored = dict.fromkeys(entry for body in bodies for entry in body.stored)
        if committed is not None:
            stored[committed] = None
        held = {node_id: call.body.holdings for node_id, call in self._asks.items()}
        inventory = Inventory(
            {**held, **self.outsiders.found},
            sorted(stored, key=lambda entry: entry.version),
            self._bad,
        )
        self.inventory = inventory
        if bodies[0].fresh:
            return Choice(NONE, go=True, fresh=True, notes=())
        step, prepared = bodies[0].step, {body.prepared for body in bodies}
        given_up = set(self._given_up())
        if positioned is not None:
            self._unpositioned = inventory.without_position(positioned)
        passed_over = given_up | self._unpositioned
        newest = inventory.newest(step=step, passed_over=passed_over, base=base)
        # What all have at hand is never given up for something older.
        at_hand = min(prepared) if len(prepared) == 1 else NONE
        is_mixed = len(prepared) > 1 or any(body.mixed for body in bodies)
        # Without positions the datasets would restart, under a model that has seen their samples.
        go = at_hand >= newest and not is_mixed and at_hand not in self._unpositioned
        chosen = at_hand if go else newest
        awaited = max((v for v in under_way if v == promised or v in given_up), default=NONE)
        if awaited > chosen and step in (-1, awaited.step):
            return None
        if not go:
            self._planned[newest, inventory.is_stored(newest)] += 1
        return Choice(chosen, go=go, fresh=False, notes=self._notes(chosen, step))

    def _given_up(self) -> Iterator[Version]:
        """Versions that were planned in vain and are still where they were: stored, or not."""
        for (version, was_stored), turns in self._planned.items():
            if turns >= TURNS_MAX and was_stored == self.inventory.is_stored(version):
                yield version

    def _notes(self, chosen: Version, step: int) -> tuple[str, ...]:
        given_up = tuple(
            f"step {version.step} could not be brought to every node in {TURNS_MAX} tries"
            for version in self._given_up()
            if version > chosen
        )
        unpositioned = tuple(
            f"step {version.step} is passed over: not every rank has said how far its data were"
            for version in sorted(self._unpositioned, reverse=True)
            if version > chosen and step in (-1, version.step)
        )
        return given_up + unpositioned[:NOTES_MAX] + self.inventory.notes(chosen, step=step)

    def stored_positions(self, version: Version) -> tuple[Position, ...]:
        """How far the data of a version were, as its manifest says."""
        entries = (entry for call in self._asks.values() for entry in call.body.stored)
        found = (entry.positions for entry in entries if entry.version == version)
        return max(found, key=len, default=())

    def take_asks(self) -> Iterator[RestoreCall]:
        """End the turn: the asks that wait for its answer."""
        asks, self._asks = self._asks, {}
        return iter(asks.values())
