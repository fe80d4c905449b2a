# SPDX-License-Identifier: Apache-2.0
"""The training of a simulated job: its pace, its saves, and what a failure takes back."""

from holdfast.core.job.checkpoints.placement import Ring
from holdfast.model.ids import Incarnation, NodeId, NodeRank
from holdfast.model.use import Use
from holdfast.model.world import Member
from holdfast.sim.control import WORKERS
from holdfast.sim.policies import Policy
from holdfast.sim.timeline import Pace, SavesState, Timeline


class TrainingState:
    """The work of a job, from step to step and from save to save."""

    def __init__(self, policy: Policy, saves: SavesState, nodes: int, rack_machines: int) -> None:
        self._policy = policy
        self._nodes = nodes
        self.saves = saves
        self.timeline = Timeline()
        self.world: tuple[int, ...] = ()
        self.from_storage = 0
        self._slow: dict[int, float] = {}
        self._copies = _CopiesState(rack_machines)
        #: Corruption was found: no state newer than this can be trusted.
        self._trusted_s: float | None = None
        self._counted_until_s = 0.0
        self._pace = Pace(1.0, 1.0, 0.0)

    @property
    def use(self) -> Use:
        return self.timeline.use

    def resume(self, now: float) -> None:
        """The training goes on, as fast as the slowest machine of the world."""
        slow = max((self._slow.get(machine, 1.0) for machine in self.world), default=1.0)
        self._pace = Pace(len(self.world) / self._nodes, slow, self.saves.share)
        self._counted_until_s = now
        self.timeline.enter(Use.PRODUCTIVE, now, pace=self._pace)

    def enter(self, use: Use, now: float, cause: str = "") -> None:
        """The training stands still, for this use."""
        self._count(now)
        self.timeline.enter(use, now, cause=cause)

    def slow(self, machine: int, factor: float, now: float) -> None:
        """From now on steps of this machine take `factor` times as long; 1 is the normal pace."""
        if factor > 1.0:
            self._slow[machine] = factor
        else:
            self._slow.pop(machine, None)
        if self.use is Use.PRODUCTIVE:
            self._count(now)
            self.resume(now)

    def stored_s(self, now: float) -> float:
        """Work that is on storage now."""
        self._count(now)
        return self.saves.stored_s

    def lost(self, machine: int) -> None:
        """A machine of the world is gone, with all that was in its memory."""
        self._copies.lost(machine, self.world, self.saves.with_peers_s)

    def distrust(self, trusted_s: float) -> None:
        """The work beyond this much was done with corrupted state."""
        self._trusted_s = trusted_s

    def go_back(self, cause: str, *, is_changed: bool) -> float:
        """Choose what a new world begins with; returns how long the restore takes.

        In a changed world some nodes do not find their state in their own memory. No productive
        span may be open.
        """
        policy, saves = self._policy, self.saves
        is_trusted = self._trusted_s is None
        if is_trusted and policy.memory and not is_changed:
            target_s, restore_s = saves.in_memory_s, policy.memory_restore_s
        elif is_trusted and policy.peers and not self._copies.are_gone(saves.with_peers_s):
            target_s, restore_s = saves.with_peers_s, policy.peer_restore_s
        else:
            target_s, restore_s = saves.stored_s, policy.storage_restore_s
            if self._trusted_s is not None:
                target_s = min(self._trusted_s, target_s)
            self.from_storage += 1
            self._copies.forget()
        lost_s = max(saves.work_s - target_s, 0.0)
        self.timeline.lose(lost_s, cause)
        saves.go_back(saves.work_s - lost_s)
        self._trusted_s = None
        return restore_s

    def _count(self, now: float) -> None:
        """Count the work that was done until now."""
        if self.use is Use.PRODUCTIVE:
            self.saves.advance(now - self._counted_until_s, self._pace.rate)
            self._counted_until_s = now


class _CopiesState:
    """Whether other machines still have copies of what was in the memory of lost machines."""

    def __init__(self, rack_machines: int) -> None:
        self._rack_machines = rack_machines
        #: Machines lost since the newest save with copies, and the world that made those copies.
        self._lost: set[int] = set()
        self._world: tuple[int, ...] = ()
        self._copied_s = -1.0

    def lost(self, machine: int, world: tuple[int, ...], copied_s: float) -> None:
        if copied_s > self._copied_s:
            self._lost, self._world, self._copied_s = set(), world, copied_s
        self._lost.add(machine)

    def forget(self) -> None:
        """All state comes from storage: machines that were lost before no longer matter."""
        self._lost, self._copied_s = set(), -1.0

    def are_gone(self, copied_s: float) -> bool:
        """Whether a machine was lost together with the one that kept its copies."""
        if len(self._lost) < 2 or copied_s > self._copied_s:
            return False
        ring = Ring([self._member(machine) for machine in self._world])
        return any(
            int(peer.node_id) in self._lost
            for machine in sorted(self._lost)
            for peer in ring.replica_peers(NodeId(machine), 1)
        )

    def _member(self, machine: int) -> Member:
        return Member(
            node_id=NodeId(machine),
            incarnation=Incarnation(1),
            node_rank=NodeRank(machine),
            nproc=WORKERS,
            host="",
            store_port=0,
            topology=f"rack-{machine // self._rack_machines}",
        )
