# SPDX-License-Identifier: Apache-2.0
"""What an agent's core is told, and what it asks its driver to do."""

from dataclasses import dataclass

from holdfast.core.kernel import Command, Event
from holdfast.protocol import messages as m

# ---- told ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorldReceived(Event):
    """The master pushed a world that this node is part of."""

    run: m.RunWorld


@dataclass(frozen=True, slots=True)
class StopReceived(Event):
    """The world is over and there is no next one yet."""

    stop: m.StopWork


@dataclass(frozen=True, slots=True)
class StartFinished(Event):
    """The driver has started what it could of a round."""

    round: int
    started: frozenset[int]
    how: str
    took_s: float
    problem: str
    """Why not all workers could be started; empty if all were."""


@dataclass(frozen=True, slots=True)
class WorkerExited(Event):
    """A worker process ended. `message` and `traceback` come from its error file."""

    local_rank: int
    pid: int
    code: int | None
    signal: int | None
    message: str
    traceback: str
    last_step_ago_s: float


@dataclass(frozen=True, slots=True)
class WorkerStopped(Event):
    """A signal that the agent did not send stopped a worker; at the end of the lease it may be the
    guardian's."""

    local_rank: int
    signal: int


@dataclass(frozen=True, slots=True)
class WorkerContinued(Event):
    local_rank: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Event):
    """The master answered: until then no other node takes this node's place."""

    until: float


@dataclass(frozen=True, slots=True)
class GivenUp(Event):
    """The master had given this node up: its workers are void, but it can rejoin as a new node."""

    reason: str


@dataclass(frozen=True, slots=True)
class FencedOff(Event):
    """A newer agent has this place: end here."""

    reason: str


@dataclass(frozen=True, slots=True)
class EndReceived(Event):
    """The job ended."""

    end: m.JobEnded
    flush: bool = False


@dataclass(frozen=True, slots=True)
class ShutdownRequested(Event):
    """This agent was asked to go, by a signal or by the process that started it."""

    reason: str
    exit_code: int
    flush: bool = False
    """True when checkpoints in memory must go to storage before the node does."""
    at_once: bool = False
    """True when a person does not want to wait any longer, not even for what is under way."""


@dataclass(frozen=True, slots=True)
class Flushed(Event):
    """What was in memory is on storage, or there was no way or no more time."""


# ---- asked --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartWorkers(Command):
    run: m.RunWorld


@dataclass(frozen=True, slots=True)
class EndWorkers(Command):
    """End every worker: at once, or with the grace that SIGTERM gives."""

    gently: bool


@dataclass(frozen=True, slots=True)
class KeepLease(Command):
    """Until then the workers may compute. The guardian holds them still after it, so that they do
    not go on while this agent stands still."""

    until: float


@dataclass(frozen=True, slots=True)
class HoldWorkers(Command):
    """Stop the workers where they are: they must not compute while no lease covers them."""


@dataclass(frozen=True, slots=True)
class ResumeWorkers(Command):
    pass


@dataclass(frozen=True, slots=True)
class Report(Command):
    """Tell the master, however long that takes."""

    body: m.WorkersStarted | m.WorkersFailed | m.WorkersDone | m.Leave


@dataclass(frozen=True, slots=True)
class Flush(Command):
    """Bring the newest checkpoint in memory to storage; `Flushed` is awaited."""


@dataclass(frozen=True, slots=True)
class Rejoin(Command):
    """Attach again as a new agent process would."""


@dataclass(frozen=True, slots=True)
class Tell(Command):
    """One line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ExitAgent(Command):
    exit_code: int
    reason: str
    end: m.JobEnded | None
