# SPDX-License-Identifier: Apache-2.0
"""Copies of a node's parts on other nodes, like agent/vault/copies.py: one version at a time, and
the newest safe version stays where it is until a newer one is safe.

In this model a save never waits for a slot. So when copies are slow, the newest version is copied
next, and the versions before it are skipped.
"""

from typing import TYPE_CHECKING

from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import NONE, SHARED, Version
from holdfast.model.errors import FencedError, RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.sim.scenario import DIRECTORY

if TYPE_CHECKING:
    from holdfast.sim.node import Agent


class Copies:
    """What one node copies to others."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._stage = agent.stage
        self._memory = agent.memory
        self._round = 0
        self._peers: tuple[c.Peer, ...] | None = None
        self._due: dict[Version, SavedStep] = {}
        self._is_running = False
        self._safe = NONE

    def begin_round(self, round_number: int) -> None:
        """A new round begins: other nodes may be reachable now."""
        self._round, self._peers = round_number, None
        self._due.clear()

    def saved(self, step: SavedStep) -> None:
        """All parts of a version are sealed on this node: copy them."""
        self._due[step.version] = step
        if not self._is_running:
            self._is_running = True
            self._agent.spawn(self._deliver_all())

    async def _deliver_all(self) -> None:
        while self._due:
            version = max(self._due)
            step, round_number = self._due.pop(version), self._round
            self._memory.pins[version] += 1
            try:
                if self._due:
                    skipped, self._due = max(self._due), {}
                    await self._give_up(skipped, round_number, "it was skipped for a newer one")
                await self._deliver(step, round_number)
            except RejectedError as exc:
                self._agent.note(f"copies of {version}: {exc}")
            finally:
                self._memory.pins[version] -= 1
        self._is_running = False

    async def _deliver(self, step: SavedStep, round_number: int) -> None:
        version = step.version
        problem = await self._copy(step, round_number)
        if problem:
            await self._give_up(version, round_number, problem)
            return
        self._stage.checkers.copies.copied(round_number, version, self._agent.place)
        await self._agent.stream.ask(c.Replicated(DIRECTORY, round_number, version), m.Done)
        self._stage.checkers.copies.safe(round_number, version)
        self._memory.pins[version] += 1
        if self._safe != NONE:
            self._memory.pins[self._safe] -= 1
        self._safe = version

    async def _copy(self, step: SavedStep, round_number: int) -> str:
        """Send every part to every peer; the ledger replaces a peer when the copy to it fails."""
        replicas = self._stage.scenario.replicas
        if self._peers is None:
            ask = c.PeersAsk(round_number, replicas, 0)
            self._peers = (await self._agent.stream.ask(ask, c.Peers)).peers
        peers, done = self._peers, set[int]()
        while waiting := [peer for peer in peers if peer.node_id not in done]:
            peer = waiting[0]
            await self._stage.clock.pause(self._agent.rng.uniform(0.01, 0.5))
            if self._round != round_number:
                raise FencedError(f"round {round_number} is over")
            if any((step.version, part) not in self._memory.copies for part in step.parts):
                return "it is not in memory any more"
            if self._send(peer, step):
                done.add(peer.node_id)
                continue
            failed = c.CopyFailed(
                DIRECTORY, round_number, step.version, "no way", peer.node_id, replicas
            )
            peers = (await self._agent.stream.ask(failed, c.Peers)).peers
            self._peers = peers or None
            if not peers:
                return "no way"
        return "" if done else "there is no other node"

    def _send(self, peer: c.Peer, step: SavedStep) -> bool:
        other = self._stage.agents.get(peer.node_id)
        if other is None or not self._agent.vault.can_reach(other):
            return False
        for part in step.parts:
            if self._memory.copies[step.version, part].is_rotten:
                return False
            # The shared part is the same on all nodes: each node has it already.
            if part != SHARED:
                other.memory.keep(step.version, part, step.shape, self._safe)
        return True

    async def _give_up(self, version: Version, round_number: int, problem: str) -> None:
        """Tell the ledger not to wait for this node's copies of this or an earlier version."""
        failed = c.CopyFailed(DIRECTORY, round_number, version, problem)
        await self._agent.stream.ask(failed, c.Peers)
