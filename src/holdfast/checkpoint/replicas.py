# SPDX-License-Identifier: Apache-2.0
"""What goes to which other node next: a queue that decides and sends nothing itself.

Versions leave in the order in which they were added, one transfer after the other, and none is
skipped. A node that refuses a part (it has no room) or cannot be reached is passed over for the
next candidate. A version is over when every part has its copies or no candidates are left for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.model.checkpoint import Version, rank_part
from holdfast.model.parity import ABSENT, Block, blocks_of
from holdfast.protocol.checkpoints import Peer


@dataclass(frozen=True, slots=True)
class Delivery:
    """A part that shall be on some of the candidates."""

    part: str
    candidates: tuple[Peer, ...]
    """In the order of preference."""
    copies: int
    block: Block | None = None
    """The parity block that the part's stripe is for; None: the whole part goes."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part, or a stripe of it, on its way to one node."""

    version: Version
    part: str
    peer: Peer
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A version that is over."""

    version: Version
    is_safe: bool
    """True when the loss of this node would not lose any part of it."""
    problem: str = ""
    """Why there are fewer copies than wanted; empty if there are enough."""


def is_due(step: int, every: int) -> bool:
    """Whether a step goes to other nodes. The same on every node, without talking about it."""
    return step % max(1, every) == 0


def replica_deliveries(
    parts: Iterable[str], peers: Sequence[Peer], copies: int
) -> tuple[Delivery, ...]:
    """Every part to `copies` of the peers."""
    return tuple(Delivery(part, tuple(peers), copies) for part in parts)


def parity_deliveries(group: Sequence[Peer], node_id: int) -> tuple[Delivery, ...]:
    """A stripe of every part of this node to each other member of its parity group."""
    place = next(i for i, peer in enumerate(group) if peer.node_id == node_id)
    members = [range(peer.first_rank, peer.first_rank + peer.nproc) for peer in group]
    return tuple(
        Delivery(rank_part(ranks[place]), (peer,), 1, Block(keeper, ranks))
        for ranks in blocks_of(members)
        if ranks[place] != ABSENT
        for keeper, peer in enumerate(group)
        if keeper != place
    )


@dataclass(eq=False, slots=True)
class _Open:
    """A delivery that is not over."""

    delivery: Delivery
    untried: list[Peer]
    accepted: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.accepted >= self.delivery.copies or not self.untried


class Deliveries:
    """The versions of one series that are on their way to other nodes."""

    def __init__(self) -> None:
        self._queue: dict[Version, list[_Open]] = {}

    @property
    def versions(self) -> tuple[Version, ...]:
        """What is not over yet, the oldest first: these must stay in memory."""
        return tuple(self._queue)

    def add(self, version: Version, deliveries: Iterable[Delivery]) -> None:
        """Send this too. For a version that is known it starts anew (the peers changed): who has
        a part already says so at once."""
        self._queue[version] = [
            _Open(delivery, list(delivery.candidates)) for delivery in deliveries
        ]

    def give_up(self, version: Version) -> None:
        """Its memory is needed, or its round is over: forget it."""
        self._queue.pop(version, None)

    def next(self) -> Transfer | None:
        """What is to be sent now: the same until its outcome is reported. None: nothing."""
        for version, deliveries in self._queue.items():
            for entry in deliveries:
                if not entry.is_over:
                    delivery = entry.delivery
                    return Transfer(version, delivery.part, entry.untried[0], delivery.block)
            # Its outcome has to be fetched first: versions are over in order.
            return None
        return None

    def accepted(self, transfer: Transfer) -> None:
        """The peer has the whole part, verified."""
        entry = self._find(transfer)
        if entry is not None:
            entry.accepted += 1
            entry.untried.pop(0)

    def failed(self, transfer: Transfer, why: str) -> None:
        """The peer refused it or could not be reached; the next candidate is tried."""
        entry = self._find(transfer)
        if entry is not None:
            entry.problems.append(why)
            entry.untried.pop(0)

    def finished(self) -> Outcome | None:
        """The oldest version, once it is over; it is forgotten then."""
        for version, deliveries in self._queue.items():
            if not all(entry.is_over for entry in deliveries):
                return None
            del self._queue[version]
            return _outcome(version, deliveries)
        return None

    def _find(self, transfer: Transfer) -> _Open | None:
        """The delivery that this transfer is the next of; None for what was given up meanwhile."""
        for entry in self._queue.get(transfer.version, ()):
            delivery = entry.delivery
            if (delivery.part, delivery.block) == (transfer.part, transfer.block):
                is_next = bool(entry.untried) and entry.untried[0] == transfer.peer
                return entry if is_next else None
        return None


def _outcome(version: Version, deliveries: Sequence[_Open]) -> Outcome:
    short = [entry for entry in deliveries if entry.accepted < entry.delivery.copies]
    is_safe = bool(deliveries) and all(entry.accepted > 0 for entry in deliveries)
    if not deliveries:
        return Outcome(version, False, f"there is no other node to keep step {version.step}")
    if not short:
        return Outcome(version, is_safe)
    worst = min(short, key=lambda entry: entry.accepted)
    why = "; ".join(worst.problems) or "there are no more nodes"
    return Outcome(
        version,
        is_safe,
        f"{worst.delivery.part} of step {version.step} is on {worst.accepted} of "
        f"{worst.delivery.copies} other nodes: {why}",
    )
