# SPDX-License-Identifier: Apache-2.0
"""What deals the data out: the master, through the agent, or a ledger in this very process."""

import threading
import time
from collections.abc import Sequence
from typing import Protocol, TypeVar

from holdfast.client.connection import LONGEST_WAIT_S, AgentClient, current
from holdfast.core.job import events as ev
from holdfast.core.job.commands import Reply
from holdfast.core.job.data.shards import Handled, Shards
from holdfast.core.kernel import Event, Tick
from holdfast.model.checkpoint import Version
from holdfast.model.dataset import Dataset, Position
from holdfast.model.errors import ProtocolError, UsageError
from holdfast.model.ids import NodeId, Round
from holdfast.protocol import messages as m
from holdfast.protocol.data import (
    DataCall,
    DataMarked,
    DatasetOpen,
    DatasetOpened,
    Mark,
    ShardsAdd,
    ShardsGrown,
    ShardsTake,
    ShardsTaken,
)
from holdfast.runtime.blocking import refusal
from holdfast.runtime.settings import worker_place

Expected = TypeVar("Expected", bound=m.Message)


class Ledger(Protocol):
    """Deals out the parts of datasets.

    Each call is carried out exactly once, and waits for as long as no answer comes. FencedError:
    the world of this process is over or, for `take`, the term is.
    """

    scope: int
    is_here: bool
    """True if it is in this process: then a request that is not held is answered at once."""

    def series(self, name: str, directory: str) -> str:
        """What the position of this dataset goes with, for a Checkpointer of this directory."""

    def open(self, dataset: Dataset) -> DatasetOpened: ...

    def take(self, request: ShardsTake) -> ShardsTaken: ...

    def add(self, name: str, first: int, shards: Sequence[tuple[str, int]], last: bool) -> None: ...

    def grow(self, name: str, ends: Sequence[int]) -> None:
        """The partitions of a stream are written up to here."""


def connect_ledger() -> Ledger:
    """The master's ledger if an agent started this process; otherwise one of its own."""
    client = current()
    if client is not None:
        return AgentLedger(client)
    world_size = worker_place().world_size
    if world_size > 1:
        raise UsageError(
            f"nobody deals out data to the {world_size} processes of this training: start it with "
            "`holdfast run`"
        )
    return OwnLedger()


class AgentLedger:
    """The master's ledger. A request is repeated under one key until it is answered."""

    is_here = False

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self.scope = client.scope

    def series(self, name: str, directory: str) -> str:
        return directory

    def open(self, dataset: Dataset) -> DatasetOpened:
        return self._client.ask(DatasetOpen(self.scope, dataset), DatasetOpened, LONGEST_WAIT_S)

    def take(self, request: ShardsTake) -> ShardsTaken:
        return self._client.ask(request, ShardsTaken, LONGEST_WAIT_S)

    def add(self, name: str, first: int, shards: Sequence[tuple[str, int]], last: bool) -> None:
        request = ShardsAdd(self.scope, name, first, tuple(shards), last)
        self._client.ask(request, m.Done, LONGEST_WAIT_S)

    def grow(self, name: str, ends: Sequence[int]) -> None:
        self._client.ask(ShardsGrown(self.scope, name, tuple(ends)), m.Done, LONGEST_WAIT_S)


class OwnLedger:
    """The same ledger without a master, for a process that trains alone.

    The code that saves and loads the state of this process takes positions and adopts them.
    """

    scope = 0
    is_here = True

    def __init__(self) -> None:
        self._machine = Shards()
        self._changed = threading.Condition()
        self._calls = self._saves = self._restores = 0
        self._answers: dict[int, m.Answer] = {}

    def series(self, name: str, directory: str) -> str:
        """Each dataset goes with its own saved state, and with nothing else."""
        return f"this process: {name}"

    def open(self, dataset: Dataset) -> DatasetOpened:
        return self._ask(DatasetOpen(0, dataset), DatasetOpened)

    def take(self, request: ShardsTake) -> ShardsTaken:
        return self._ask(request, ShardsTaken)

    def add(self, name: str, first: int, shards: Sequence[tuple[str, int]], last: bool) -> None:
        self._ask(ShardsAdd(0, name, first, tuple(shards), last), m.Done)

    def grow(self, name: str, ends: Sequence[int]) -> None:
        self._ask(ShardsGrown(0, name, tuple(ends)), m.Done)

    def position(self, dataset: Dataset, marks: tuple[Mark, ...]) -> Position:
        """Where a dataset is when this much of its leases is consumed."""
        with self._changed:
            self._saves += 1
            version = Version(self._restores, self._saves)
            marked = DataMarked(dataset.series, 0, version, {0: marks}, world_size=1)
            facts = self._handle(ev.DataMarks(NodeId(0), 0, 0, marked))
        (fact,) = [fact for fact in facts if isinstance(fact, ev.VersionMarked)]
        return fact.positions[0]

    def adopt(self, dataset: Dataset, position: Position) -> None:
        """Go on from this position."""
        with self._changed:
            self._restores += 1
            version = Version(self._restores, self._saves)
            agreed = ev.RestoreAgreed(
                dataset.series, Round(0), version, self._restores, False, (), (position,)
            )
            self._handle(agreed)

    def _ask(self, body: DataCall, expected: type[Expected]) -> Expected:
        """One request; waits as long as the ledger holds it."""
        with self._changed:
            self._calls += 1
            call = self._calls
            # No request is repeated here, so there is no session by which to recognise repeats.
            self._handle(ev.DataRequested(NodeId(0), 0, call, "", call, body))
            while call not in self._answers:
                deadline = self._machine.deadline()
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._changed.wait(left_s):
                    self._handle(Tick())
            answer = self._answers.pop(call)
        if isinstance(answer, m.Refused):
            raise refusal(answer)
        if not isinstance(answer, expected):
            raise ProtocolError(f"{type(body).__name__} was answered {type(answer).__name__}")
        return answer

    def _handle(self, event: Handled) -> list[Event]:
        outcome = self._machine.handle(event, time.monotonic())
        for command in outcome.commands:
            if isinstance(command, Reply):
                self._answers[command.call] = command.body
        self._changed.notify_all()
        return outcome.facts
