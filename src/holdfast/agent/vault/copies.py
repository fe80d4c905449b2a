# SPDX-License-Identifier: Apache-2.0
"""Copies of this node's parts on other nodes, as replicas or as parity.

The agent copies one version after the other. It begins with the next one when the previous one is
*safe*, which is when every node of the round has its copies elsewhere. Until then the version is
held still in memory. So is the newest safe one, because a lost node is restored from it. This slows
training down only if slots run out. If copies do not get through, or the master is away and cannot
say what is safe, the agent lets go of versions instead, and says so.

The agent tells the ledger at once when a copy fails: the ledger names another peer, or lets all
nodes go on.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import Memory, digest_of_slot
from holdfast.agent.vault.shelf import KEPT_FOR_OTHERS
from holdfast.checkpoint.arena import PartKey, Pin
from holdfast.checkpoint.peer_server import SlotReader
from holdfast.checkpoint.replicas import Transfer, is_due, parity_transfers, replica_transfers
from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import NONE, SHARED, Series, Version
from holdfast.model.errors import FencedError, HoldfastError, RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.runtime.observe import Level

TRANSFER_S = 600.0
"""How long one copy may take, and how long this node waits for the copies of the other nodes."""

WAITED_S = 0.1
"""A save that has waited this long for a slot checks whether the master answers."""

MASTER_S = 0.5
"""A master that is there answers within this time."""


class Copies:
    """The copies of one series."""

    def __init__(self, means: Means, memory: Memory, series: Series) -> None:
        self.series = series
        self._means = means
        self._memory = memory
        #: Slots that must not be overwritten: of versions that are due and not safe yet, and of the
        #: newest safe one.
        self._pins: dict[Version, list[Pin]] = {}
        self._due: dict[Version, SavedStep] = {}
        self._round = 0
        #: Which peer gets which of this node's parts; None until the ledger was asked.
        self._plan: tuple[Transfer, ...] | None = None
        self._is_running = False
        #: The version that is being copied, or waits for the master's word that all nodes have
        #: copied it.
        self._on_its_way = NONE
        self._safe = NONE
        #: Copies did not get through: training does not wait for them until one does.
        self.is_stalled = False
        #: Set while there are copies, but fewer than wanted.
        self._is_short = False

    def is_due(self, version: Version) -> bool:
        """Whether this version goes to other nodes."""
        wanted = self.series.replicas > 0 or self.series.parity > 0
        return wanted and is_due(version.step, self.series.replicate_every)

    def begin_round(self, round: int) -> None:
        """Other nodes may be there now; a version that was not safe in the previous round never
        will be."""
        self._round, self._plan, self.is_stalled = round, None, False
        self._due.clear()
        self._release(version for version in list(self._pins) if version != self._safe)

    def part_sealed(self, version: Version, part: str) -> None:
        """A part of a due version is sealed: hold it still."""
        if not self.is_stalled:
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

    def give_up_oldest(self) -> bool:
        """A save needs a slot: let go of the oldest version that is not safe; False if none is."""
        unsafe = sorted(version for version in self._pins if version != self._safe)
        if not unsafe:
            return False
        problem = f"the copies of step {unsafe[0].step} take too long"
        self._stall(problem)
        self._due.pop(unsafe[0], None)
        self._release([unsafe[0]])
        self._means.spawn(self._tell_given_up(unsafe[0], problem), "a copy that was given up")
        return True

    async def while_a_save_waits(self) -> None:
        """Do not hold training up when the master is away: the save needs no copy to be safe.

        The safe version and the one on its way stay pinned for as long as that leaves a slot.
        """
        has_let_go = False
        while self._pins:
            await asyncio.sleep(WAITED_S)
            try:
                async with asyncio.timeout(MASTER_S):
                    ask = c.PeersAsk(self._round, self.series.replicas, self.series.parity)
                    await self._means.ask(ask, c.Peers)
            except TimeoutError:
                if has_let_go:
                    self.give_up_oldest()
                    continue
                has_let_go = True
                self._stall("the master does not answer")
                kept = (self._safe, self._on_its_way)
                self._release(version for version in list(self._pins) if version not in kept)
            except HoldfastError:
                continue  # A refusal is an answer.

    # ---- sending --------------------------------------------------------------------------------

    async def _deliver_all(self) -> None:
        try:
            while self._due:
                # When copies fail, only the newest version is worth a transfer.
                version = max(self._due) if self.is_stalled else min(self._due)
                step, round = self._due.pop(version), self._round
                self._on_its_way = version
                try:
                    await self._skip([older for older in self._due if older < version])
                    await self._deliver(step)
                except FencedError:
                    self._release([version])
                except HoldfastError as exc:
                    self._release([version])
                    if self._round == round:
                        self._stall(str(exc))
        finally:
            self._is_running, self._on_its_way = False, NONE

    async def _skip(self, versions: list[Version]) -> None:
        for version in versions:
            del self._due[version]
        self._release(versions)
        if versions:
            await self._tell_given_up(max(versions), "it was skipped for a newer one")

    async def _deliver(self, step: SavedStep) -> None:
        """Copy this version, and wait until the other nodes have copied theirs."""
        version, round = step.version, self._round
        for part in step.parts:
            self._pin(version, part)
        try:
            await self._copy(step, round)
        except FencedError:
            raise
        except HoldfastError as exc:
            await self._tell_given_up(version, str(exc))
            raise
        try:
            async with asyncio.timeout(TRANSFER_S):
                replicated = c.Replicated(self.series.directory, round, version)
                await self._means.ask(replicated, m.Done)
        except TimeoutError:
            problem = f"the other nodes have not copied step {version.step} in {TRANSFER_S:g} s"
            await self._tell_given_up(version, problem)
            raise RejectedError(problem) from None
        if self._round == round:
            self._is_safe(step)

    async def _copy(self, step: SavedStep, round: int) -> None:
        """Send every part to every peer; the ledger replaces a peer that cannot be sent to."""
        version = step.version
        transfers = await self._transfers(step)
        done: set[Transfer] = set()
        while waiting := [transfer for transfer in transfers if transfer not in done]:
            transfer = waiting[0]
            problem = await self._send(transfer, version, round)
            if self._round != round:
                raise FencedError(f"round {round} is over")
            if not problem:
                done.add(transfer)
                continue
            self._plan = None
            replicas = 0 if self.series.parity else self.series.replicas
            failed = c.CopyFailed(
                self.series.directory, round, version, problem, transfer.peer.node_id, replicas
            )
            peers = (await self._means.ask(failed, c.Peers)).peers
            if not peers:
                raise RejectedError(problem)
            transfers = self._planned(step, peers)

    async def _transfers(self, step: SavedStep) -> tuple[Transfer, ...]:
        """Which peer gets which part; the same for the whole round, unless a peer fails."""
        if self._plan is None:
            ask = c.PeersAsk(self._round, self.series.replicas, self.series.parity)
            return self._planned(step, (await self._means.ask(ask, c.Peers)).peers)
        return self._plan

    def _planned(self, step: SavedStep, peers: tuple[c.Peer, ...]) -> tuple[Transfer, ...]:
        if self.series.parity:
            plan = parity_transfers(peers, self._means.node_id)
        else:
            # The shared part is the same on all nodes: it has its copies already.
            own = [part for part in step.parts if part != SHARED]
            plan = replica_transfers(own, peers)
            self._say_if_short(len(peers))
        if not plan:
            raise RejectedError(f"there is no other node to keep step {step.version.step}")
        self._plan = plan
        return plan

    def _say_if_short(self, peers: int) -> None:
        is_short = peers < self.series.replicas
        if is_short != self._is_short:
            self._is_short = is_short
            few = f"checkpoints are copied to {peers} of {self.series.replicas} other nodes"
            if is_short:
                self._means.say(few, Level.WARNING)
            else:
                self._means.say("there are enough copies on other nodes again")

    async def _send(self, transfer: Transfer, version: Version, round: int) -> str:
        """Send a part; returns what went wrong, empty if the peer has the part now."""
        path = self._path(version, transfer.part)
        try:
            await self._means.quietly(self._put, transfer, path, version, round)
        except FencedError:
            raise
        except (HoldfastError, OSError) as exc:
            self._path(version, transfer.part)  # Raises if the slot is gone: not the peer's fault.
            return str(exc)
        return ""

    def _path(self, version: Version, part: str) -> Path:
        path = self._memory.find(self.series.directory, version, part)
        if path is None:
            raise RejectedError(f"{part} of step {version.step} is not in memory any more")
        return path

    def _put(self, transfer: Transfer, path: Path, version: Version, round: int) -> None:
        directory, client = self.series.directory, self._means.peer(transfer.peer.address)
        with self._means.maps.reading(path) as slot:
            meta = slot.read()
            if meta is None or meta.version != version:
                raise RejectedError(f"{transfer.part} of step {version.step} is overwritten")
            reader = SlotReader(slot, meta, digest_of_slot(path, slot, meta).data)
            if transfer.block is None:
                client.put(directory, round, reader, TRANSFER_S, safe=self._safe)
            else:
                client.put_stripe(
                    directory, round, reader, transfer.block, TRANSFER_S, safe=self._safe
                )

    def _is_safe(self, step: SavedStep) -> None:
        """Every node has its copies of this version elsewhere: older versions may be
        overwritten."""
        self._safe, self.is_stalled = step.version, False
        for part in step.parts:
            self._pin(step.version, part)
        self._release(older for older in list(self._pins) if older < step.version)
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        """Remove copies that other nodes no longer renew here, because their parts go elsewhere
        now."""
        newest: dict[PartKey, Version] = {}
        held = self._memory.held(self.series.directory)
        kept = [one for one in held if one.key.node == KEPT_FOR_OTHERS]
        for one in kept:
            newest[one.key] = max(newest.get(one.key, NONE), one.meta.version)
        for one in kept:
            if newest[one.key] < self._safe:
                self._memory.drop_if_free(one.path)

    async def _tell_given_up(self, version: Version, problem: str) -> None:
        """Tell the ledger not to wait for this node's copies of this version, or of an older
        one."""
        failed = c.CopyFailed(self.series.directory, self._round, version, problem)
        await self._means.ask(failed, c.Peers)

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
        if not self.is_stalled:
            self.is_stalled = True
            self._means.say(
                f"training goes on without waiting for copies on other nodes: {why}", Level.WARNING
            )
