# SPDX-License-Identifier: Apache-2.0
"""The map of the master: which event reaches which machine, in which order. Read this first.

Inputs come from the driver, facts from the machines themselves; both go through this table. Within
one step, everything that follows from an event is handled before the next event is.
"""

from dataclasses import dataclass

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.checkpoints import Checkpoints
from holdfast.core.job.liveness import Liveness
from holdfast.core.job.nodes import Nodes
from holdfast.core.job.progress import Progress
from holdfast.core.job.rendezvous import Rendezvous
from holdfast.core.job.sync import Sync
from holdfast.core.job.verdicts import Verdicts
from holdfast.core.kernel import Core
from holdfast.model.job import JobSpec


@dataclass(frozen=True, slots=True)
class JobCore:
    """The wired core, with its machines for those who only want to look."""

    core: Core
    nodes: Nodes
    liveness: Liveness
    rendezvous: Rendezvous
    sync: Sync
    verdicts: Verdicts
    progress: Progress
    checkpoints: Checkpoints

    def view(self, now: float) -> dict[str, object]:
        """The state of the job as people and tools see it."""
        return {
            **self.verdicts.view(),
            "world": self.rendezvous.view(),
            "nodes": self.nodes.view(),
            "progress": self.progress.view(now),
            "store": self.sync.view(),
            "checkpoints": self.checkpoints.view(),
        }


def build(spec: JobSpec, job: str) -> JobCore:
    """Create the machines and connect them."""
    nodes, liveness, rendezvous = Nodes(spec, job), Liveness(spec), Rendezvous()
    sync, verdicts, progress, checkpoints = Sync(), Verdicts(spec), Progress(), Checkpoints()
    core = Core((nodes, liveness, rendezvous, sync, verdicts, progress, checkpoints))

    # Inputs.
    core.route(ev.MasterStarted, checkpoints, rendezvous, nodes, verdicts)
    core.route(ev.AttachRequested, nodes)
    core.route(ev.NodeAbsent, liveness, rendezvous, sync, checkpoints)
    core.route(ev.LeaveRequested, nodes)
    core.route(ev.BeatReceived, liveness, progress)
    core.route(ev.StartReported, progress, rendezvous)
    core.route(ev.StoreOffered, rendezvous)
    core.route(ev.NodeWarmed, rendezvous)
    core.route(ev.FailureReported, rendezvous)
    core.route(ev.DoneReported, rendezvous)
    core.route(ev.KvRequested, sync)
    core.route(ev.CheckpointRequested, checkpoints)
    core.route(ev.RequestDropped, sync)
    core.route(ev.NodeSeen, nodes)
    core.route(ev.StopRequested, verdicts)

    # Facts.
    core.route(ev.JobOpened, rendezvous, verdicts, progress)
    core.route(ev.GenerationRaised, nodes)
    core.route(ev.NodeOrdered)
    core.route(ev.NodeExpected, liveness, sync, rendezvous)
    core.route(ev.NodeReady, liveness, sync, rendezvous, checkpoints)
    # Several may go silent at once: nothing is built on the next when the first is lost.
    core.route(ev.NodeSilent, nodes, rendezvous, checkpoints)
    core.route(ev.NodeLost, liveness, sync, checkpoints, rendezvous)  # nobody waits for the lost
    core.route(ev.LeaseExpired, nodes, liveness, rendezvous)
    core.route(ev.WorldHurt, verdicts)
    core.route(ev.WorldBroken, progress, checkpoints, rendezvous)  # progress times the stages
    core.route(ev.WorldFormed, nodes, sync, progress, checkpoints)
    core.route(ev.WorldFound, checkpoints)
    core.route(ev.WorldStarted, progress)
    core.route(ev.WorldDone, checkpoints)  # the end waits for what is on its way to storage
    core.route(ev.WorkSettled, verdicts)
    core.route(ev.WorldImpossible, verdicts)
    core.route(ev.JobFinished, nodes, rendezvous, progress, checkpoints)
    core.route(ev.IncidentClosed)
    core.route(ev.RestoreAgreed)
    core.route(ev.AttemptOpened)
    core.route(ev.AttemptFailed)
    core.route(ev.CheckpointCommitted)

    core.own(nodes, rec.RulesSet, rec.NodePlanned, rec.NodeAdmitted, rec.NodePhaseChanged)
    core.own(nodes, rec.RelaunchCounted, rec.CountersSet)
    core.own(rendezvous, rec.GenerationSet, rec.WorldAgreed, rec.RoundBroken, rec.NodeDone)
    core.own(sync, rec.KvChanged, rec.KvDropped, rec.QueueChanged, rec.SessionRemembered)
    core.own(sync, rec.BarrierReleased, rec.ScopesDropped)
    core.own(verdicts, rec.RestartCounted, rec.JobClosed)
    core.own(progress, rec.TimeSpent, rec.StepsSeen, rec.StageEntered, rec.IncidentNoted)
    core.own(checkpoints, rec.CheckpointCommitted, rec.LineageSet)
    return JobCore(core, nodes, liveness, rendezvous, sync, verdicts, progress, checkpoints)
