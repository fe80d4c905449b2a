# SPDX-License-Identifier: Apache-2.0
"""The worker group of one node: which round it runs, how it ends, and what comes next.

The group is always heading somewhere: to the workers of a round, to nothing (waiting for the next
world), or to the exit of the agent. The next thing begins only when every process of the present
round has ended, so that two rounds never run at once on one node.
"""

from collections.abc import Iterable
from typing import assert_never

from msgspec.structs import replace

from holdfast.core.kernel import NOTHING, Outcome, Record, Tick
from holdfast.core.node import events as ev
from holdfast.model.node import ExitReason, classify_exit, is_mistake
from holdfast.protocol import messages as m

STOPPED_S = 5.0
"""How long a worker may stand still after a SIGSTOP that was not ours, e.g. under a debugger."""

TERMINATED_S = 0.2
"""How long a worker that SIGTERM ended is no failure yet: SLURM and systemd send it to every
process of a job, and this agent may only be about to get its own."""

MISTAKE_S = 5.0
"""How long a mistake that a worker made before any step waits for the other workers to make it too.
A mistake of all workers is not tried again, and need not be shown once for each of them."""

_SIGTERM = 15

_SIGNAL_NAMES = {
    1: "SIGHUP", 2: "SIGINT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
    11: "SIGSEGV", 13: "SIGPIPE", 15: "SIGTERM", 19: "SIGSTOP", 20: "SIGTSTP", 24: "SIGXCPU",
}  # fmt: skip

Handled = (
    ev.WorldReceived
    | ev.StopReceived
    | ev.StartFinished
    | ev.WorkerExited
    | ev.WorkerStopped
    | ev.WorkerContinued
    | ev.LeaseRenewed
    | ev.EndReceived
    | ev.ShutdownRequested
    | ev.FencedOff
    | ev.GivenUp
    | ev.Flushed
    | Tick
)


class Workers:
    """The worker group. Nothing is durable: the agent's death ends its workers too."""

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        #: The round whose workers run or start here; None when none do.
        self._run: m.RunWorld | None = None
        #: The newest round that was ever taken up here.
        self._newest_round = 0
        self._next: m.RunWorld | None = None
        self._is_starting = False
        self._is_ending = False
        self._live: set[int] = set()
        self._exited: set[int] = set()
        self._stopped: dict[int, float] = {}
        #: A failure that may only be the beginning of a stop, or of the same failure of all
        #: workers, and until when that is open.
        self._doubt: tuple[m.FailureInfo, float] | None = None
        #: Of the workers that have ended, how many made the mistake that is in doubt.
        self._alike = 0
        self._lease_until: float | None = None
        self._is_held = False
        self._exit: ev.ExitAgent | None = None
        #: Told to the master when nothing is left to do here, right before the exit.
        self._farewell: m.Leave | None = None
        self._must_flush = False
        self._is_flushing = False
        self._rejoins = False

    @property
    def round(self) -> int:
        """The round whose workers run here, as the master is told on attach; 0 if none do."""
        return self._run.round if self._run is not None and not self._is_ending else 0

    @property
    def is_leaving(self) -> bool:
        """Whether this agent is on its way out."""
        return self._exit is not None

    def handle(self, event: Handled, now: float) -> Outcome:
        # An agent that stood still has missed the end of its lease, whatever it hears first then.
        outcome = self._hold_if_due(now)
        outcome.add(self._decide(event, now))
        return outcome

    def _decide(self, event: Handled, now: float) -> Outcome:
        match event:
            case ev.WorldReceived():
                return self._world(event.run)
            case ev.StopReceived():
                return self._head_for(None, gently=False)
            case ev.StartFinished():
                return self._started(event)
            case ev.WorkerExited():
                return self._exited_one(event, now)
            case ev.WorkerStopped():
                if not self._is_held:
                    self._stopped[event.local_rank] = now + STOPPED_S
            case ev.WorkerContinued():
                self._stopped.pop(event.local_rank, None)
            case ev.LeaseRenewed():
                return self._renew(event.until, now)
            case ev.EndReceived():
                return self._job_ended(event)
            case ev.ShutdownRequested():
                return self._shut_down(event)
            case ev.FencedOff():
                if self._exit is None:
                    self._exit = ev.ExitAgent(1, event.reason, None)
                    return self._head_for(None, gently=False)
            case ev.GivenUp():
                if self._exit is None:
                    self._rejoins = True
                    self._newest_round = 0
                    return self._head_for(None, gently=False)
            case ev.Flushed():
                if self._exit is not None and self._is_flushing:
                    self._is_flushing = False
                    return self._settle()
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)
        return NOTHING

    def _job_ended(self, event: ev.EndReceived) -> Outcome:
        if self._exit is None:
            code = 0 if event.end.ok else 1
            if event.end.stopped:
                code = 128 + event.end.stopped
                # The job goes on later: its next master need not wait for this node.
                self._farewell = m.Leave(event.end.reason)
            self._exit = ev.ExitAgent(code, event.end.reason, event.end)
            self._must_flush = event.flush
            return self._head_for(None, gently=True)
        if event.end.ok:
            # The agent was asked to go when its work was done: the end of the job is what counts.
            # If the exit was commanded already, it is commanded again with this end.
            self._exit = ev.ExitAgent(0, event.end.reason, event.end)
            self._farewell = None
            return self._settle()
        return NOTHING

    def _shut_down(self, event: ev.ShutdownRequested) -> Outcome:
        if self._exit is not None:
            # Asked again: SLURM and systemd ask more than once, and mean one end with one grace.
            if not event.at_once:
                return NOTHING
            self._must_flush = self._is_flushing = False
            return self._end_workers(gently=False)
        outcome = Outcome()
        self._exit = ev.ExitAgent(event.exit_code, event.reason, None)
        leave = m.Leave(event.reason)
        # At once: a person's second Ctrl-C may come before the master's word of the first.
        if event.at_once:
            outcome.commands.append(ev.Report(leave))
        else:
            # Until this node has left, the others wait for its workers, which may still compute,
            # and for what it holds.
            self._must_flush, self._farewell = event.flush, leave
        outcome.add(self._head_for(None, gently=not event.at_once))
        return outcome

    def _world(self, run: m.RunWorld) -> Outcome:
        if run.round <= self._newest_round or self._exit is not None:
            return NOTHING
        self._newest_round = run.round
        return self._head_for(run, gently=run.planned)

    def _head_for(self, run: m.RunWorld | None, *, gently: bool) -> Outcome:
        self._next = run
        if self._run is None:
            return self._settle()
        return self._end_workers(gently=gently)

    def _end_workers(self, *, gently: bool) -> Outcome:
        if self._run is None:
            return self._settle()
        # To act on SIGTERM, held workers would have to go on, and another world may compute by now.
        outcome = Outcome(commands=[ev.EndWorkers(gently and not self._is_held)])
        self._is_ending = True
        self._stopped.clear()
        self._doubt = None
        if self._is_held:
            self._is_held = False
            outcome.commands.append(ev.ResumeWorkers())
        outcome.add(self._settle())
        return outcome

    def _settle(self) -> Outcome:
        """Begin what comes next, once nothing of the present is left."""
        if self._is_starting or self._live:
            return NOTHING
        self._run, self._is_ending = None, False
        outcome = Outcome()
        if self._is_flushing:
            return outcome
        if self._must_flush:
            self._must_flush, self._is_flushing = False, True
            outcome.commands.append(ev.Flush())
        elif self._exit is not None:
            if self._farewell is not None:
                outcome.commands.append(ev.Report(self._farewell))
            outcome.commands.append(self._exit)
        elif self._rejoins:
            self._rejoins = False
            outcome.commands.append(ev.Rejoin())
        elif self._next is not None:
            self._run, self._next = self._next, None
            self._is_starting, self._exited = True, set()
            outcome.commands.append(ev.StartWorkers(self._run))
        return outcome

    def _started(self, event: ev.StartFinished) -> Outcome:
        self._is_starting = False
        self._live |= event.started - self._exited
        if self._is_ending:
            # The end was decided while the start was under way: end the latest workers too.
            outcome = Outcome(commands=[ev.EndWorkers(gently=False)])
            outcome.add(self._settle())
            return outcome
        assert self._run is not None
        if event.problem:
            failure = _failure(self._run, -1, 0, None, None, ExitReason.UNKNOWN, event.problem)
            return self._fail(failure)
        report = m.WorkersStarted(event.round, 0, event.how, event.took_s)
        outcome = Outcome(commands=[ev.Report(report)])
        if self._is_held:
            # The lease ended while they started: the signal reached only those that ran already.
            outcome.commands.append(ev.HoldWorkers())
        if not self._live and len(self._exited) == self._nproc:
            outcome.commands.append(ev.Report(m.WorkersDone(event.round)))
        return outcome

    def _exited_one(self, event: ev.WorkerExited, now: float) -> Outcome:
        self._live.discard(event.local_rank)
        self._exited.add(event.local_rank)
        self._stopped.pop(event.local_rank, None)
        if self._run is None or self._is_ending:
            return self._settle()
        if self._doubt is not None:
            return self._follows(self._doubt[0], event)
        if event.code == 0:
            if not self._live and not self._is_starting and len(self._exited) == self._nproc:
                return Outcome(commands=[ev.Report(m.WorkersDone(self._run.round))])
            return NOTHING
        said = f"{event.message}\n{event.traceback}"
        reason = classify_exit(event.code, event.signal, said=said)
        message = event.message or _how_it_ended(event)
        failure = _failure(
            self._run,
            event.local_rank,
            event.pid,
            event.code,
            event.signal,
            reason,
            message,
            event.traceback,
            event.last_step_ago_s,
        )
        if event.signal == _SIGTERM:
            self._doubt = (failure, now + TERMINATED_S)
            return NOTHING
        if is_mistake(message) and event.last_step_ago_s < 0:
            self._doubt, self._alike = (failure, now + MISTAKE_S), 0
            return self._follows(failure, event)
        return self._fail(failure)

    def _follows(self, first: m.FailureInfo, event: ev.WorkerExited) -> Outcome:
        """A worker ended while the failure of the first is in doubt."""
        if not is_mistake(first.message):
            return NOTHING  # Whatever the first one's end turns out to be, this one follows it.
        if (event.message, event.traceback) != (first.message, first.traceback):
            return self._fail(first)
        self._alike += 1
        if self._alike < self._nproc:
            return NOTHING
        return self._fail(replace(first, alike=self._alike))

    def _fail(self, failure: m.FailureInfo) -> Outcome:
        """Report the first failure at once; the others of this group are its consequences."""
        assert self._run is not None
        self._doubt = None
        report = m.WorkersFailed(self._run.round, (failure,))
        outcome = Outcome(commands=[ev.Report(report)])
        outcome.add(self._head_for(self._next, gently=False))
        return outcome

    def _renew(self, until: float, now: float) -> Outcome:
        # An answer may have been under way for long: it vouches for the time that it names.
        if self._lease_until is not None and until <= self._lease_until:
            return NOTHING
        self._lease_until = until
        if until <= now:
            return NOTHING
        # The guardian first: it must know until when, before anything goes on.
        outcome = Outcome(commands=[ev.KeepLease(until)])
        if self._is_held:
            self._is_held = False
            text = "the master answers again: the workers go on"
            outcome.commands.extend((ev.ResumeWorkers(), ev.Tell(text)))
        return outcome

    def _hold_if_due(self, now: float) -> Outcome:
        outcome = Outcome()
        holds_at = self._holds_at()
        if holds_at is not None and holds_at <= now:
            self._is_held = True
            self._stopped.clear()  # The guardian stopped them, or they will go on with the others.
            text = "the master has not answered for the whole lease: the workers are held still"
            outcome.commands.extend((ev.HoldWorkers(), ev.Tell(text)))
        return outcome

    def _tick(self, now: float) -> Outcome:
        outcome = Outcome()
        if self._doubt is not None and self._doubt[1] <= now:
            outcome.add(self._fail(self._doubt[0]))
        for local_rank, at in list(self._stopped.items()):
            if at <= now and not self._is_ending and self._run is not None:
                message = f"was stopped by a signal and did not continue within {STOPPED_S:g} s"
                failure = _failure(
                    self._run, local_rank, 0, None, None, ExitReason.STALLED, message
                )
                outcome.add(self._fail(failure))
                break
        return outcome

    def _holds_at(self) -> float | None:
        """When the workers must be held still; None if there is nothing to hold."""
        if self._is_held or self._run is None or self._is_ending:
            return None
        return self._lease_until

    def deadline(self) -> float | None:
        times = [*self._stopped.values()]
        if self._doubt is not None:
            times.append(self._doubt[1])
        holds_at = self._holds_at()
        if holds_at is not None:
            times.append(holds_at)
        return min(times, default=None)

    def apply(self, record: Record) -> None:
        raise TypeError(f"{record!r}: an agent keeps no records")

    def snapshot(self) -> Iterable[Record]:
        return ()


def _failure(
    run: m.RunWorld,
    local_rank: int,
    pid: int,
    code: int | None,
    signal: int | None,
    reason: ExitReason,
    message: str,
    traceback: str = "",
    last_step_ago_s: float = -1.0,
) -> m.FailureInfo:
    return m.FailureInfo(
        rank=run.rank_offset + max(local_rank, 0),
        local_rank=local_rank,
        pid=pid,
        exit_code=code,
        signal=signal,
        reason=reason,
        message=message,
        traceback=traceback,
        last_step_ago_s=last_step_ago_s,
    )


def _how_it_ended(event: ev.WorkerExited) -> str:
    if event.signal is not None:
        return f"was ended by {_SIGNAL_NAMES.get(event.signal, f'signal {event.signal}')}"
    return f"exited with code {event.code}"
