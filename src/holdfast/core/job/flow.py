# SPDX-License-Identifier: Apache-2.0
"""The map of the master: which event reaches which machine, in which order. Read this first.

Inputs come from the driver, facts from the machines themselves; both go through this table. Within
one step, everything that follows from an event is handled before the next event is.
"""

from dataclasses import dataclass

from holdfast.core.job import events as ev
from holdfast.core.job.accounting.progress import Progress
from holdfast.core.job.accounting.tallies import Tallies
from holdfast.core.job.checkpoints.checkpoints import Checkpoints
from holdfast.core.job.data.shards import Shards
from holdfast.core.job.health.hangs import Hangs
from holdfast.core.job.health.verdicts import Verdicts
from holdfast.core.job.membership.demand import Demand
from holdfast.core.job.membership.liveness import Liveness
from holdfast.core.job.membership.nodes import Nodes
from holdfast.core.job.rendezvous.rendezvous import Rendezvous
from holdfast.core.job.roles.roles import Roles
from holdfast.core.job.sync.sync import Sync
from holdfast.core.kernel import Core
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec

NEWS = (
    ev.NobodyHeard,
    ev.HeardAgain,
    ev.NodeOrdered,
    ev.PlanSettled,
    ev.MemoryRaised,
    ev.HostAvoided,
    ev.GroupMoved,
    ev.RankGivenUp,
    ev.IncidentClosed,
    ev.AttemptOpened,
    ev.CopyFailed,
    ev.SavesFailed,
    ev.CopiesResumed,
    ev.DatasetRegistered,
    ev.DatasetRestored,
    ev.EpochOver,
    ev.PieceSetAside,
)
"""Facts for people: no machine reacts to them."""


@dataclass(frozen=True, slots=True)
class JobCore:
    """The wired core, with its machines, for code that only looks."""

    core: Core
    nodes: Nodes
    liveness: Liveness
    rendezvous: Rendezvous
    sync: Sync
    verdicts: Verdicts
    progress: Progress
    checkpoints: Checkpoints
    tallies: Tallies
    shards: Shards
    hangs: Hangs
    roles: Roles

    def name_of(self, node_id: NodeId) -> str:
        """A node as people ask for it: "node/3" by its rank, "ps/0" in a role; empty: not known."""
        return self.nodes.name_of(node_id) or self.roles.name_of(node_id)

    def view(self, now: float) -> dict[str, object]:
        """The state of the job as people and tools see it."""
        saving = self.tallies.view(now)
        saved_step = max(saving["memory_step"], self.checkpoints.newest_safe())
        return {
            **self.verdicts.view(),
            "world": self.rendezvous.view(now),
            "nodes": [*self.nodes.view(now), *self.roles.view()],
            "wanted": {**self.nodes.wanted(), "roles": self.roles.wanted()},
            "progress": self.progress.view(now, saved_step),
            "store": self.sync.view(),
            "checkpoints": self.checkpoints.view(),
            "saving": saving,
            "datasets": self.shards.view(now),
        }


def build(spec: JobSpec, job: str) -> JobCore:
    """Create the machines and connect them."""
    demand = Demand(spec.limits)
    nodes, roles = Nodes(spec, job, demand), Roles(spec, demand)
    liveness, rendezvous, sync = Liveness(spec), Rendezvous(), Sync()
    verdicts, progress, hangs = Verdicts(spec), Progress(), Hangs(spec)
    checkpoints, tallies, shards = Checkpoints(), Tallies(), Shards()
    # A snapshot has the records of all machines in this order.
    agents = nodes, liveness, rendezvous, sync, verdicts, progress
    wired = JobCore(
        core=Core((*agents, checkpoints, tallies, shards, hangs, roles)),
        nodes=nodes,
        liveness=liveness,
        rendezvous=rendezvous,
        sync=sync,
        verdicts=verdicts,
        progress=progress,
        checkpoints=checkpoints,
        tallies=tallies,
        shards=shards,
        hangs=hangs,
        roles=roles,
    )
    _route(wired)
    return wired


def _route(job: JobCore) -> None:
    """The map itself."""
    core, nodes, roles = job.core, job.nodes, job.roles
    liveness, rendezvous, sync = job.liveness, job.rendezvous, job.sync
    verdicts, progress, hangs = job.verdicts, job.progress, job.hangs
    checkpoints, tallies, shards = job.checkpoints, job.tallies, job.shards

    # Inputs.
    core.route(ev.MasterStarted, checkpoints, rendezvous, nodes, verdicts, shards, roles)
    core.route(ev.AttachRequested, nodes)
    core.route(ev.NodeAbsent, liveness, rendezvous, sync, checkpoints, shards, hangs)
    core.route(ev.LeaveRequested, nodes)
    core.route(ev.BeatReceived, liveness, nodes, progress, tallies, hangs)
    core.route(ev.StartReported, progress, rendezvous)
    core.route(ev.StoreOffered, rendezvous)
    core.route(ev.NodeWarmed, nodes, rendezvous)
    core.route(ev.FailureReported, rendezvous)
    core.route(ev.DoneReported, rendezvous, hangs)
    core.route(ev.KvRequested, sync)
    core.route(ev.CheckpointRequested, progress, checkpoints)
    core.route(ev.DataRequested, shards)
    core.route(ev.DataMarks, checkpoints, shards)
    core.route(ev.RequestDropped, sync, shards)
    core.route(ev.NodeSeen, nodes, roles)

    # Facts.
    core.route(ev.JobOpened, rendezvous, verdicts, progress, hangs)
    core.route(ev.GenerationRaised, nodes)
    core.route(ev.JournalBehind, verdicts)
    core.route(ev.NodeExpected, liveness, sync, rendezvous, checkpoints)
    core.route(ev.NodeReady, liveness, sync, rendezvous, checkpoints, shards, hangs)
    # Several may go silent at once: nothing is built on the next when the first is lost.
    core.route(ev.NodeSilent, nodes, rendezvous, checkpoints)
    # Waits for it end, and its work goes back, before a world forms without it.
    core.route(ev.NodeLost, tallies, liveness, sync, shards, checkpoints, rendezvous)
    core.route(ev.LeaseExpired, nodes, liveness, rendezvous)
    core.route(ev.WorldHurt, verdicts)
    core.route(ev.WorldBroken, progress, tallies, hangs, checkpoints, rendezvous, nodes)
    core.route(ev.WorldFormed, nodes, sync, verdicts, progress, checkpoints, tallies, shards, hangs)
    core.route(ev.WorldFound, nodes, verdicts, checkpoints, tallies, shards, hangs)
    core.route(ev.WorldStarted, progress, verdicts)
    core.route(ev.FirstStepLate, progress)
    core.route(ev.FirstStepMade, verdicts, nodes)  # budgets come back; nodes that are to go may go
    core.route(ev.WorldDone, checkpoints)  # the end waits for what is on its way to storage
    core.route(ev.WorkSettled, verdicts)
    core.route(ev.WorldImpossible, verdicts)
    core.route(ev.JobFinished, nodes, rendezvous, progress, checkpoints, hangs, roles)
    core.route(ev.AttemptFailed, tallies)
    core.route(ev.CheckpointCommitted, tallies)
    core.route(ev.RestoreAgreed, progress, tallies, shards)  # the data goes back with the model
    core.route(ev.DatasetFollows, checkpoints)
    core.route(ev.VersionMarked, checkpoints)
    for news in NEWS:
        core.route(news)

    # What people ask of a running job, and what follows from it.
    core.route(ev.StopRequested, verdicts)
    core.route(ev.PlanAsked, nodes, roles)
    core.route(ev.PlanPartAgreed, nodes, roles)
    core.route(ev.RulesChanged, verdicts, rendezvous)
    core.route(ev.JobSuspended, verdicts, progress, roles)
    core.route(ev.JobResumed, progress, rendezvous, nodes, roles)
    core.route(ev.JoinClockSet, rendezvous)
    core.route(ev.NodesLeaving, rendezvous)
