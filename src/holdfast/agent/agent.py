# SPDX-License-Identifier: Apache-2.0
"""One node's agent: drives the worker core between the master's stream and real processes."""

import asyncio
import contextlib
import math
import random
import signal
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from holdfast.agent.group import Group, Program
from holdfast.agent.network import ReservedPort
from holdfast.agent.processes import Processes, WorkerExit
from holdfast.agent.pulse import Pulse
from holdfast.agent.relay import Relay
from holdfast.agent.stream import MasterStream
from holdfast.agent.vault.vault import Vault
from holdfast.agent.warmth import Warmth
from holdfast.core.kernel import Command, Tick
from holdfast.core.node import events as ev
from holdfast.core.node.workers import Handled, Workers
from holdfast.model.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointPush
from holdfast.runtime.observe import Details, Level, Say
from holdfast.runtime.transport import listen

FAREWELL_S = 2.0
"""How long a leaving agent waits for the master to take note."""

PARTING_S = 10.0
"""The same wait at the end of the job. It is longer, because a master that was killed meanwhile is
back within seconds and waits for this node's report."""

END_S = 300.0
"""At the end of the job the agent brings checkpoints from memory to storage. It gives up when
nothing has reached storage for this long."""

FLUSH_S_MAX = 24 * 3600.0

FLUSH_S_MIN = 5.0
"""The least time that the agent gives checkpoints in memory to reach storage, even if the workers
used up all the grace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Everything one agent is told."""

    master: str
    token: bytes
    tls: ssl.SSLContext | None
    rules: m.JobRules
    program: Program
    host: str
    node_rank: int
    """-1: the master assigns one."""
    node_id: int
    """-1: no platform launched this node."""
    topology: str
    """Where the node stands; empty if unknown."""
    runtime_dir: Path
    """Private folder for the socket."""
    grace_s: float
    """Between SIGTERM and SIGKILL of a worker."""
    leave_s: float = 0.0
    """How long this node may take to leave, including what it brings to storage; 0 means
    `grace_s`."""
    spares: bool
    excluded_roots: tuple[str, ...]
    first_contact_s: float
    """How long an unreachable master is tried before the first attach."""
    process: str = ""
    """The name of this process, by which a master on the same machine can look for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPorts:
    """What an agent uses of the machine that it runs on. The simulator has its own."""

    make_processes: Callable[..., Processes] = Processes
    make_vault: Callable[..., Vault] = Vault
    reserve_port: Callable[[], ReservedPort] = ReservedPort
    monotonic: Callable[[], float] = time.monotonic
    """The clock of the progress cells."""
    uniform: Callable[[float, float], float] = random.uniform
    """A random number between two bounds, so that many agents do not do the same at once."""


REAL = AgentPorts()


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent ended."""

    exit_code: int
    reason: str
    end: m.JobEnded | None


class Agent:
    """Supervises the workers of one node."""

    def __init__(self, settings: AgentSettings, say: Say, ports: AgentPorts = REAL) -> None:
        self._settings, self._say = settings, say
        self._reserve_port, self._monotonic = ports.reserve_port, ports.monotonic
        self._loop = asyncio.get_running_loop()
        nproc = settings.program.launch.nproc
        self._core = Workers(nproc)
        self._group: Group | None = None
        self._port = ports.reserve_port()
        self._old_port: ReservedPort | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._errands: set[asyncio.Task[None]] = set()
        #: When the last step of the previous round finished on this node.
        self._last_step_at: float | None = None
        self._leaves_by, self._unreported = 0.0, 0
        self._all_reported = asyncio.Event()
        self._has_parted = False
        #: Why something that was in memory may be missing on storage; empty if nothing is.
        self._doubt = ""
        self._end: asyncio.Future[AgentEnd] = self._loop.create_future()
        #: Set once the job is known to have ended well while this agent was saying farewell.
        self._better_end: AgentEnd | None = None
        self._processes = ports.make_processes(
            on_exit=self._worker_exited,
            on_stopped=lambda rank, number: self.feed(ev.WorkerStopped(rank, number)),
            on_continued=lambda rank: self.feed(ev.WorkerContinued(rank)),
            say=say,
            spares=settings.spares,
            base_env=settings.program.env,
            excluded_roots=settings.excluded_roots,
            on_warm=lambda: self._warmth.spares_ready(self._group),
        )
        self._stream = MasterStream(
            self,
            settings.master,
            settings.token,
            tls=settings.tls,
            first_contact_s=settings.first_contact_s,
            uniform=ports.uniform,
        )
        self._warmth: Warmth = Warmth(
            settings.program, self._processes, self._stream, run=self._run, say=say
        )
        has_tls = settings.tls is not None
        self._vault = ports.make_vault(
            self._stream,
            say,
            settings.token,
            nproc,
            has_tls=has_tls,
            host=settings.host,
            monotonic=ports.monotonic,
        )
        self._pulse = Pulse(
            self._stream,
            self._processes,
            group=lambda: self._group,
            tally=self._vault.tally,
            is_warm=lambda: self._warmth.is_warm,
            renewed=self._lease_renewed,
        )

    @property
    def has_joined(self) -> bool:
        """Whether a master has ever accepted this agent."""
        return self._stream.has_attached

    async def run(self) -> AgentEnd:
        """Serve until the job, or this node's part in it, is over."""
        relay = Relay(self._stream, self._vault)
        server = await listen(self._settings.program.launch.socket, relay, self._settings.token)
        stream = self._loop.create_task(self._stream.run())
        stream.add_done_callback(self._stream_ended)
        try:
            end = await self._end
            await self._say_farewell(FAREWELL_S if end.end is None else PARTING_S)
            return self._better_end or end
        finally:
            stream.cancel()
            self._stream.close()
            self._pulse.stop()
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()
            await server.close()
            self._warmth.close()
            await self._processes.close()
            await self._vault.close()
            if self._group is not None:
                self._group.close()
            self._port.close()
            if self._old_port is not None:
                self._old_port.close()

    def shut_down(
        self, reason: str, exit_code: int, *, with_job: bool = False, at_once: bool = False
    ) -> None:
        """Leave the job: the workers end with grace, and the agent tells the master.

        With `with_job` the whole job stops with this node, so the other nodes need not go on
        without it. What is in memory then has all the time that it needs, unless a platform kills
        this node soon (`leave_s`).
        """
        settings = self._settings
        if not self._core.is_leaving:  # Asked again: the grace is given once.
            limit_s = settings.leave_s or (math.inf if with_job else settings.grace_s)
            self._leaves_by = self._loop.time() + limit_s
        flush = with_job or self._vault.has_unsaved
        if at_once:
            self._doubt = "an agent was told to end at once"
        self.feed(ev.ShutdownRequested(reason, exit_code, flush, at_once))

    def feed(self, event: Handled) -> None:
        """Let the core decide, and do what it says."""
        outcome = self._core.handle(event, self._loop.time())
        if not isinstance(event, ev.LeaseRenewed | Tick):
            self._say(Details(event), Level.DEBUG)
        for command in outcome.commands:
            if not isinstance(command, ev.KeepLease | ev.Tell):
                self._say(Details(command), Level.DEBUG)
            self._execute(command)
        at = self._core.deadline()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer = None if at is None else self._loop.call_at(at, self.feed, Tick())

    def _execute(self, command: Command) -> None:
        match command:
            case ev.StartWorkers():
                self._run(self._start(command.run))
            case ev.EndWorkers():
                if command.gently:
                    self._run(self._processes.stop(self._settings.grace_s))
                else:
                    self._processes.kill_now()
            case ev.Report(m.WorkersDone() as done):
                self._run(self._report_done(done))
            case ev.Report():
                if isinstance(command.body, m.Leave):
                    # `Parting` goes first: a node that has left is no longer a node of the job.
                    self._part()
                self._report(command.body)
            case ev.Flush():
                self._run(self._flush())
            case ev.KeepLease():
                self._processes.keep_lease(command.until)
            case ev.HoldWorkers():
                self._processes.signal_all(signal.SIGSTOP)
            case ev.ResumeWorkers():
                self._processes.signal_all(signal.SIGCONT)
            case ev.Rejoin():
                self._stream.rejoin()
            case ev.Tell():
                self._say(command.text)
            case ev.ExitAgent():
                end = AgentEnd(command.exit_code, command.reason, command.end)
                if self._end.done():
                    self._better_end = end
                else:
                    if command.end is not None:
                        self._part()
                    self._end.set_result(end)

    def _run(self, errand: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errand_done)

    def _errand_done(self, task: asyncio.Task[None]) -> None:
        self._errands.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._end.done():
            self._end.set_exception(task.exception() or RuntimeError("an errand failed"))

    # ---- workers --------------------------------------------------------------------------------

    async def _start(self, run: m.RunWorld) -> None:
        if self._group is not None:
            ago_s = self._group.last_step_ago_s()
            self._last_step_at = None if ago_s < 0 else self._loop.time() - ago_s
            self._group.close()
        self._vault.begin_round(run.round, run.group_rank)
        # The old port stays ours until the next round: its store may still be in use.
        if self._old_port is not None:
            self._old_port.close()
        self._old_port, self._port = self._port, self._reserve_port()
        self._warmth.round_begins(run)
        program, memory_of = self._settings.program, self._vault.newest_of
        group = self._group = Group(
            program, run, self._processes, self._monotonic, memory_of, self._say
        )
        began = self._loop.time()
        started, how, problem = await group.start()
        took_s = self._loop.time() - began
        self.feed(ev.StartFinished(run.round, started, how, took_s, problem))
        self._pulse.workers_started()

    def _worker_exited(self, exit: WorkerExit) -> None:
        message, trace, last_step_ago_s = "", "", -1.0
        if self._group is not None:
            last_step_ago_s = self._group.last_step_ago_s()
            message, trace = self._group.ended(exit.local_rank)
        self.feed(
            ev.WorkerExited(
                exit.local_rank, exit.pid, exit.code, exit.signal, message, trace, last_step_ago_s
            )
        )

    # ---- the master -----------------------------------------------------------------------------

    def _lease_renewed(self, until: float) -> None:
        self._vault.leased(until)
        self.feed(ev.LeaseRenewed(until))

    def attachment(self) -> m.Attach:
        settings = self._settings
        return m.Attach(
            agent_key="",
            rules=settings.rules,
            nproc=settings.program.launch.nproc,
            host=settings.host,
            store_port=self._port.number,
            hosted_port=self._warmth.hosted_port,
            cold=self._core.round == 0 and self._warmth.is_cold,
            round=self._core.round,
            node_id=settings.node_id,
            node_rank=settings.node_rank,
            topology=settings.topology,
            peer_port=self._vault.peer_port,
            peer_certificate=self._vault.peer_certificate,
            process=settings.process,
            log_dir=str(settings.program.log_dir.absolute()),
            grace_s=settings.grace_s,
        )

    def attached(self, welcome: m.Attached, *, sent_at: float) -> None:
        self._pulse.begin(welcome, sent_at=sent_at)
        self._vault.joined(welcome.node_id)
        if self._core.round == 0:
            self._warmth.attached(welcome)

    def pushed(self, body: m.AnyMessage) -> None:
        match body:
            case m.RunWorld():
                self.feed(ev.WorldReceived(body))
            case m.StopWork():
                self.feed(ev.StopReceived(body))
            case m.Fenced():
                self._vault.given_up()
                self.feed(ev.FencedOff(body.reason))
            case m.JobEnded():
                self._leaves_by = math.inf
                # Workers that are told to stop may save once more.
                flush = body.stopped > 0 or self._vault.has_unsaved
                self.feed(ev.EndReceived(body, flush))
            case _ if isinstance(body, CheckpointPush):
                self._vault.pushed(body)

    def refused(self, refusal: m.Refused) -> None:
        self._vault.given_up()
        if refusal.kind == "stale":
            self.feed(ev.GivenUp(refusal.message))
        elif refusal.kind == "fenced":
            self.feed(ev.FencedOff(refusal.message))
        elif not self._end.done():
            self._end.set_exception(UsageError(refusal.message))

    def stream_lost(self, why: str) -> None:
        if not self._core.is_leaving:
            self._say(f"{why}; the workers go on, trying to reach it again", Level.WARNING)

    def not_our_master(self, why: str) -> None:
        self._say(f"{why}; trying again", Level.WARNING)

    def _stream_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._end.done():
            self._end.set_exception(task.exception() or RuntimeError("the stream ended"))

    def _part(self) -> None:
        if not self._has_parted:
            self._has_parted = True
            # From now on other nodes may commit what this node has written.
            self._vault.left()
            self._report(m.Parting(self._doubt))

    def _report(
        self, body: m.WorkersStarted | m.WorkersFailed | m.WorkersDone | m.Leave | m.Parting
    ) -> None:
        if isinstance(body, m.WorkersStarted):
            at = self._last_step_at
            ago_s = -1.0 if at is None else self._loop.time() - at
            body = replace(body, store_port=self._port.number, last_step_ago_s=ago_s)
        self._unreported += 1
        self._all_reported.clear()

        def answered(_: m.AnyMessage) -> None:
            self._unreported -= 1
            if self._unreported == 0:
                self._all_reported.set()

        self._stream.call(body, answered)

    async def _report_done(self, done: m.WorkersDone) -> None:
        """Bring checkpoints to storage before the report: the job may end once the master has
        it."""
        await self._vault.settle()
        await _flush(self._vault, math.inf, self._say)
        # Workers may end with success because of a SIGTERM, which also makes this agent leave.
        if not self._core.is_leaving:
            self._report(done)

    async def _flush(self) -> None:
        limit_s = self._leaves_by - self._loop.time()
        if not await _flush(self._vault, limit_s, self._say):
            self._doubt = f"an agent gave up: nothing more reached storage for {END_S:g} s"
        self.feed(ev.Flushed())

    async def _say_farewell(self, limit_s: float) -> None:
        if self._unreported:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_reported.wait(), limit_s)


async def _flush(vault: Vault, limit_s: float, say: Say) -> bool:
    """Bring what is in memory to storage. Without a limit the agent goes on for as long as
    something reaches storage; False if it gave up."""
    if limit_s < math.inf:
        await vault.flush(max(FLUSH_S_MIN, limit_s))
        return True
    flush = asyncio.create_task(vault.flush(FLUSH_S_MAX))
    while not flush.done():
        written = vault.written_bytes
        await asyncio.wait((flush,), timeout=END_S)
        if not flush.done() and vault.written_bytes == written:
            say(
                f"nothing more reached storage for {END_S:g} s: what is left is given up",
                Level.ERROR,
            )
            flush.cancel()
            await asyncio.wait((flush,))
    if flush.cancelled():
        return False
    flush.result()
    return True
