# SPDX-License-Identifier: Apache-2.0
"""DataShards asks for the next part before it is needed, and for no more than it can use."""

import threading

from holdfast.client.data import DataShards
from holdfast.client.data.ledgers import OwnLedger
from holdfast.protocol.data import ShardsTake, ShardsTaken
from tests.waiting import until

LIMIT_S = 120.0


class FarLedger(OwnLedger):
    """A ledger that is asked from a thread, as a master is, and that can be away for a while."""

    is_here = False

    def __init__(self) -> None:
        super().__init__()
        self.is_there = threading.Event()
        self.is_there.set()
        self.asked: list[ShardsTake] = []
        self.answered = 0
        self._ends: dict[int, int] = {}
        self.most_out = 0

    def take(self, request: ShardsTake) -> ShardsTaken:
        self.asked.append(request)
        assert self.is_there.wait(LIMIT_S)
        answer = super().take(request)
        for said in request.consumed:
            if said.upto >= self._ends.get(said.lease, said.upto + 1):
                del self._ends[said.lease]
        self._ends |= {lease.number: lease.piece.end for lease in answer.leases}
        self.most_out = max(self.most_out, len(self._ends))
        self.answered += 1
        return answer


def test_a_part_taken_while_a_report_is_under_way_has_the_next_one_fetched_after_it() -> None:
    """Nobody did, and the reader stood still for a round trip when the part was read."""
    ledger = FarLedger()
    shards = DataShards("train", size=40, shard_size=10, report_every_s=0.0, ledger=ledger)
    parts = shards.pieces()
    first = next(parts)
    until(lambda: ledger.answered == 3, LIMIT_S, "the dataset, the first part and the second")

    def reports() -> bool:
        shards.consumed(first, first.begin + 5)
        return len(ledger.asked) == 4

    ledger.is_there.clear()
    until(reports, LIMIT_S, "a report")
    assert next(parts).begin == 10
    assert [request.want for request in ledger.asked] == [0, 1, 1, 0]
    ledger.is_there.set()
    until(lambda: ledger.answered == 5, LIMIT_S, "the third part")
    assert ledger.asked[4].want == 1

    ledger.is_there.clear()
    assert next(parts).begin == 20, "it is here, whether or not the master is"
    ledger.is_there.set()
    assert [part.begin for part in parts] == [30]
    shards.close()


def test_a_reader_holds_one_part_beside_the_one_that_it_reads() -> None:
    ledger = FarLedger()
    shards = DataShards("train", size=500, shard_size=10, report_every_s=0.0, ledger=ledger)
    assert list(shards) == list(range(500))
    # The part that was just finished is told of with the request that brings the next one.
    assert ledger.most_out <= 3
    assert all(request.want <= 1 for request in ledger.asked)
    shards.close()
