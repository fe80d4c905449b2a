# SPDX-License-Identifier: Apache-2.0
"""Copies of this node's parts on other nodes, as replicas or as parity.

Versions go one after the other: the next one leaves when the one before is *safe*, which is when
every node of the round has its copies elsewhere. Until then the version is held still in memory,
and so is the newest safe one: it is what a lost node is restored from. The only brake on training
is that slots run out; if copies do not get through, that brake is let go, and it is said.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import Memory, digest_of_slot
from holdfast.agent.vault.shelf import KEPT_FOR_OTHERS
from holdfast.checkpoint.arena import PartKey, Pin
from holdfast.checkpoint.peer_server import SlotReader
from holdfast.checkpoint.replicas import (
    Deliveries,
    Delivery,
    Transfer,
    is_due,
    parity_deliveries,
    replica_deliveries,
)
from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import NONE, SHARED, Series, Version
from holdfast.model.errors import FencedError, HoldfastError, RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

SAFE_S = 60.0
"""How long the copies of the other nodes are waited for."""

TRANSFER_S = 600.0


class Copies:
    """The copies of one series."""

    def __init__(self, means: Means, memory: Memory, series: Series) -> None:
        self.series = series
        self._means = means
        self._memory = memory
        #: What must not be overwritten: what is due and not safe yet, and what is safe.
        self._pins: dict[Version, list[Pin]] = {}
        self._due: dict[Version, SavedStep] = {}
        self._round = 0
        self._deliveries: tuple[Delivery, ...] | None = None
        self._is_running = False
        self._safe = NONE
        self._safe_rose = asyncio.Event()
        #: Set when copies did not get through: then training does not wait for them.
        self._is_stalled = False
        #: Set while there are copies, but fewer than wanted.
        self._is_short = False

    def is_due(self, version: Version) -> bool:
        """Whether this version goes to other nodes."""
        wanted = self.series.replicas > 0 or self.series.parity > 0
        return wanted and is_due(version.step, self.series.replicate_every)

    def begin_round(self, round: int) -> None:
        """Other nodes may be there now; what was not safe before will not be any more."""
        self._round, self._deliveries, self._is_stalled = round, None, False
        self._due.clear()
        self._release(version for version in list(self._pins) if version != self._safe)
        self._wake()

    def part_sealed(self, version: Version, part: str) -> None:
        """A part of a due version is sealed: hold it still."""
        if not self._is_stalled:
            self._pin(version, part)

    def overtaken(self, versions: Iterable[Version]) -> None:
        """These versions will never be whole."""
        self._release(versions)

    def saved(self, step: SavedStep) -> None:
        """All parts of a due version are sealed on this node: copy them."""
        self._due[step.version] = step
        if not self._is_running:
            self._is_running = True
            self._means.spawn(self._deliver_all(), "copying to other nodes")

    def safe(self, version: Version) -> None:
        """Every node has its copies of this version elsewhere: older ones may go."""
        if version <= self._safe:
            return
        self._safe, self._is_stalled = version, False
        held = self._memory.held(self.series.directory)
        if version not in self._pins:
            for one in held:
                if one.meta.version == version and one.key.node < 0:
                    self._pin(version, one.key.part)
        self._release(older for older in list(self._pins) if older < version)
        self._drop_abandoned()
        self._wake()

    def _drop_abandoned(self) -> None:
        """Copies of parts that now go to another node are not renewed here: they are useless."""
        newest: dict[PartKey, Version] = {}
        held = self._memory.held(self.series.directory)
        kept = [one for one in held if one.key.node == KEPT_FOR_OTHERS]
        for one in kept:
            newest[one.key] = max(newest.get(one.key, NONE), one.meta.version)
        for one in kept:
            if newest[one.key] < self._safe:
                self._memory.drop_if_free(one.path)

    def give_up_oldest(self) -> bool:
        """A save needs a slot: let go of the oldest version that is not safe; False if none is."""
        unsafe = sorted(version for version in self._pins if version != self._safe)
        if not unsafe:
            return False
        self._stall(f"the copies of step {unsafe[0].step} take too long")
        self._due.pop(unsafe[0], None)
        self._release([unsafe[0]])
        return True

    # ---- sending --------------------------------------------------------------------------------

    async def _deliver_all(self) -> None:
        try:
            while self._due:
                if self._is_stalled:
                    # Only the newest is worth the while of whoever takes it.
                    self._forget_due(set(self._due) - {max(self._due)})
                version = min(self._due)
                step = self._due.pop(version)
                try:
                    await self._deliver(step)
                except FencedError:
                    self._release([version])
                except HoldfastError as exc:
                    self._release([version])
                    self._stall(str(exc))
        finally:
            self._is_running = False

    def _forget_due(self, versions: set[Version]) -> None:
        for version in versions:
            del self._due[version]
        self._release(versions)

    async def _deliver(self, step: SavedStep) -> None:
        version, round = step.version, self._round
        for part in step.parts:
            self._pin(version, part)
        deliveries = Deliveries()
        deliveries.add(version, await self._plan(step))
        while (transfer := deliveries.next()) is not None:
            try:
                await self._means.quietly(self._send, transfer, self._path(transfer), round)
            except FencedError:
                raise
            except (HoldfastError, OSError) as exc:
                deliveries.failed(transfer, str(exc))
            else:
                deliveries.accepted(transfer)
            if self._round != round:
                raise FencedError(f"round {round} is over")
        outcome = deliveries.finished()
        assert outcome is not None
        if not outcome.is_safe:
            raise RejectedError(outcome.problem)
        if bool(outcome.problem) != self._is_short:
            self._is_short = bool(outcome.problem)
            self._means.say(outcome.problem or "there are enough copies on other nodes again")
        await self._means.ask(c.Replicated(self.series.directory, round, version), m.Done)
        await self._wait_safe(version)

    async def _plan(self, step: SavedStep) -> tuple[Delivery, ...]:
        """Who gets what; the same for the whole round."""
        if self._deliveries is None:
            series = self.series
            ask = c.PeersAsk(self._round, series.replicas, series.parity)
            peers = (await self._means.ask(ask, c.Peers)).peers
            if series.parity:
                self._deliveries = parity_deliveries(peers, self._means.node_id)
            else:
                # What is the same on all nodes has its copies already.
                own = [part for part in step.parts if part != SHARED]
                self._deliveries = replica_deliveries(own, peers, series.replicas)
        return self._deliveries

    def _path(self, transfer: Transfer) -> Path:
        path = self._memory.find(self.series.directory, transfer.version, transfer.part)
        if path is None:
            raise RejectedError(f"{transfer.part} of step {transfer.version.step} is gone")
        return path

    def _send(self, transfer: Transfer, path: Path, round: int) -> None:
        directory, client = self.series.directory, self._means.peer(transfer.peer.address)
        with self._means.maps.reading(path) as slot:
            meta = slot.read()
            if meta is None or meta.version != transfer.version:
                raise RejectedError(f"{transfer.part} of step {transfer.version.step} is gone")
            reader = SlotReader(slot, meta, digest_of_slot(path, slot, meta).data)
            if transfer.block is None:
                client.put(directory, round, reader, TRANSFER_S)
            else:
                client.put_stripe(directory, round, reader, transfer.block, TRANSFER_S)

    async def _wait_safe(self, version: Version) -> None:
        """Until every node has its copies; RejectedError if that takes too long."""
        try:
            async with asyncio.timeout(SAFE_S):
                while self._safe < version and not self._is_stalled and version in self._pins:
                    await self._safe_rose.wait()
        except TimeoutError:
            raise RejectedError(
                f"the other nodes have not copied step {version.step} within {SAFE_S:g} s"
            ) from None

    # ---- pins -----------------------------------------------------------------------------------

    def _pin(self, version: Version, part: str) -> None:
        path = self._memory.find(self.series.directory, version, part)
        pins = self._pins.setdefault(version, [])
        if path is not None and all(pin.path != path for pin in pins):
            pins.append(self._memory.pin(path, f"step {version.step} is copied to other nodes"))

    def _release(self, versions: Iterable[Version]) -> None:
        for version in list(versions):
            for pin in self._pins.pop(version, ()):
                self._memory.unpin(pin)

    def _stall(self, why: str) -> None:
        if not self._is_stalled:
            self._is_stalled = True
            self._means.say(f"training goes on without waiting for copies on other nodes: {why}")
        self._wake()

    def _wake(self) -> None:
        self._safe_rose.set()
        self._safe_rose = asyncio.Event()
