# SPDX-License-Identifier: Apache-2.0
"""One master, from its state directory to the end of its job."""

import asyncio
import secrets
import signal
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec

from holdfast.core.job import events as ev
from holdfast.core.job import flow
from holdfast.core.job.records import decode_record, encode_record
from holdfast.core.kernel import Event
from holdfast.master import notes
from holdfast.master.http import serve
from holdfast.master.neighbours import Neighbours
from holdfast.master.service import Service
from holdfast.model.errors import InUseError, StateError
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.model.node import Phase
from holdfast.ports.desk import Desk
from holdfast.ports.journal import Entry, Journal
from holdfast.ports.platform import Platform
from holdfast.ports.surroundings import ALONE, Surroundings
from holdfast.protocol import messages as m
from holdfast.runtime import lifeline, tls
from holdfast.runtime.journal import SqliteJournal, read_left
from holdfast.runtime.loop import Driver, JobClock
from holdfast.runtime.observe import Level, Say, monotonic_name, wall_clock
from holdfast.runtime.process_names import wait_for_end
from holdfast.runtime.signals import Patience, on_end_signals
from holdfast.runtime.token import make_token
from holdfast.runtime.transport import listen


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterSettings:
    """Everything a master is told when it starts."""

    job: str
    listen: str
    state: Path
    token_file: Path | None
    """None: `state`/token, made if it is missing."""
    http: str
    """HOST:PORT for people and Prometheus; empty for none."""
    tls_cert: Path | None
    tls_key: Path | None
    insecure: bool
    spec: JobSpec
    hands_over: bool = False
    """True: SIGTERM ends this master and not its job: the program that runs it starts another."""


CERTIFICATE_LOOK_S = 60.0
"""How often the files of the certificate are looked at."""

TAKE_OVER_S = 300.0
"""How long a master whose launcher is gone may take to end: its nodes bring their memory to storage
first."""


def _open_journal(settings: MasterSettings) -> Journal:
    return SqliteJournal.open(settings.state, job=settings.job)


async def run_master(
    settings: MasterSettings,
    *,
    say: Say,
    announce: Callable[[str], None],
    surroundings: Surroundings = ALONE,
    lifeline: int = -1,
    open_journal: Callable[[MasterSettings], Journal] = _open_journal,
) -> m.JobEnded | None:
    """Serve the job until it ends; None if it goes on under the next master.

    Raises StateError or UsageError if it cannot. When `lifeline` reaches end-of-file, the launcher
    of this master is gone, and the master stops.
    """
    settings.spec.validate()
    for address in filter(None, (settings.listen, settings.http)):
        has_tls = settings.tls_cert is not None
        tls.require_tls(address, has_tls=has_tls, insecure=settings.insecure)
    journal = await _take_journal(settings, say, open_journal, wait=lifeline >= 0)
    try:
        return await _serve(settings, journal, say, announce, surroundings, lifeline)
    finally:
        journal.close()


async def _take_journal(
    settings: MasterSettings,
    say: Say,
    open_journal: Callable[[MasterSettings], Journal],
    *,
    wait: bool,
) -> Journal:
    """The journal; with `wait` a master whose launcher is gone may first end in order."""
    try:
        return open_journal(settings)
    except InUseError as exc:
        if not wait or not exc.is_ending:
            raise
        say(f"waiting for the master before this one (pid {exc.pid}): it is about to end")
        await wait_for_end(exc.pid, TAKE_OVER_S)
    return open_journal(settings)


async def _serve(
    settings: MasterSettings,
    journal: Journal,
    say: Say,
    announce: Callable[[str], None],
    surroundings: Surroundings,
    line: int,
) -> m.JobEnded | None:
    token_file = settings.token_file or settings.state / "token"
    token = make_token(token_file)
    spec = settings.spec
    if surroundings.begin is not None and not journal.load():
        spec = await surroundings.begin(spec)
    engine = build_engine(
        settings.job,
        spec,
        journal,
        say,
        clock_name=monotonic_name(),
        has_launcher=line >= 0,
    )
    service, driver = engine.service, engine.driver
    secured: ssl.SSLContext | None = None
    async with AsyncExitStack() as open_things:
        open_things.callback(driver.stop)
        if settings.tls_cert is not None:
            certificate = tls.ServedCertificate(settings.tls_cert, settings.tls_key)
            secured = certificate.context
            open_things.callback(asyncio.create_task(_watch(certificate, say)).cancel)
        server = await listen(settings.listen, service, token, tls=secured)
        open_things.push_async_callback(server.close)
        http_address = ""
        if settings.http:
            shown = (service.view, token)
            http = await serve(settings.http, *shown, history=service.history, tls=secured)
            open_things.push_async_callback(http.close)
            http_address = http.address
        await _surround(engine, surroundings, open_things)
        try:
            note = notes.write(settings, server.address, http_address, token_file)
            open_things.callback(note.unlink, missing_ok=True)
        except StateError as exc:
            if line < 0:
                raise
            # A launcher's master may be the second one of a healthy job.
            say(f"{exc}; the job goes on without it", Level.WARNING)
        engine.start(nonce=secrets.token_hex(4))
        neighbours = Neighbours(engine.core.nodes.processes, driver.feed)
        open_things.callback(neighbours.close)
        if not spec.managed:  # Else the platform knows which nodes live.
            neighbours.look()
        handed_over = _stop_on_signals(
            engine,
            neighbours,
            line,
            hands_over=settings.hands_over,
            is_managed=spec.managed,
        )
        announce(server.address)
        ends = (service.finished, engine.fatal, handed_over)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await driver.drain()
        return next(end for end in ends if end.done()).result()


async def _watch(certificate: tls.ServedCertificate, say: Say) -> None:
    while True:
        # In a thread: its files may be on a disk that hangs.
        for sentence in await asyncio.to_thread(certificate.look, wall_clock()):
            say(sentence)
        await asyncio.sleep(CERTIFICATE_LOOK_S)


@dataclass(frozen=True, slots=True)
class Engine:
    """What runs a job: the core, its driver, the links' service, and a future for what must never
    happen."""

    core: flow.JobCore
    driver: Driver
    service: Service
    clock: JobClock
    fatal: asyncio.Future[m.JobEnded | None]

    def start(self, nonce: str) -> None:
        """Begin to serve, under a name that no other start has."""
        clock = self.clock
        self.driver.feed(ev.MasterStarted(nonce, self.driver.position, clock.name, clock.zero_s))

    def running_nodes(self) -> frozenset[NodeId]:
        """The nodes that the platform had when the last master looked."""
        return frozenset(
            cast(NodeId, row["node_id"])
            for row in (*self.core.nodes.view(self.clock.now()), *self.core.roles.view())
            if row["phase"] in (Phase.PENDING, Phase.RUNNING)
        )

    def ended_early(self, task: "asyncio.Task[None]") -> None:
        """A task is over that should last as long as the job."""
        if not task.cancelled() and not self.fatal.done() and (exc := task.exception()):
            self.fatal.set_exception(exc)


def build_engine(
    job: str,
    spec: JobSpec,
    journal: Journal,
    say: Say,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    clock_name: str,
    wall: Callable[[], float] = wall_clock,
    watch: Callable[[Event], None] = lambda event: None,
    has_launcher: bool = False,
) -> Engine:
    """The engine as the journal left it. It does not serve yet. `watch` is told what happens."""
    entries = journal.load()
    job_core = replayed(job, spec, entries)
    kept = job_core.nodes.last_clock()
    clock = JobClock(entries, wall(), monotonic, name=clock_name, kept=kept)
    fatal: asyncio.Future[m.JobEnded | None] = asyncio.get_running_loop().create_future()

    def failed(exc: Exception) -> None:
        if not fatal.done():
            fatal.set_exception(exc)

    service = Service(
        job,
        job_core,
        now=clock.now,
        say=say,
        failed=failed,
        wall=wall,
        has_launcher=has_launcher,
    )

    def observe(event: Event, now: float) -> None:
        watch(event)
        service.observe(event, now)

    driver = Driver(
        job_core.core,
        journal,
        clock=clock.now,
        wall=wall,
        encode=encode_record,
        execute=service.execute,
        observe=observe,
        failed=failed,
        say=say,
    )
    service.connect_core(driver.feed, lambda: driver.position, driver.follow)
    return Engine(job_core, driver, service, clock, fatal)


def replayed(job: str, spec: JobSpec, entries: Sequence[Entry]) -> flow.JobCore:
    """The state to which these entries lead."""
    job_core = flow.build(spec, job)
    for number, entry in enumerate(entries):
        try:
            job_core.core.replay(decode_record(entry.payload))
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as exc:
            raise StateError(
                f"record {number} of the journal cannot be understood ({exc}): it was written by a "
                "newer Holdfast or is damaged; nothing was changed"
            ) from exc
    return job_core


def view_left(state: Path) -> dict[str, object]:
    """The job as the journal of a master that is gone left it."""
    job, entries = read_left(state)
    if not entries:
        raise StateError(f"the journal in {state} is empty")
    last = entries[-1]
    return {
        "job": job,
        "time_s": round(last.at_s, 3),
        "wall_s": round(last.wall_s, 3),
        "started_wall_s": round(last.wall_s - last.at_s, 3),
        "from_journal": True,
        "attached": 0,
        **replayed(job, JobSpec(), entries).view(last.at_s),
    }


async def _surround(
    engine: Engine, surroundings: Surroundings, open_things: AsyncExitStack
) -> None:
    """Connect the platform and the desk with the core, where there are any."""

    def listen_to(source: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(source)
        # Without this task the job would go on blind: another master is better.
        task.add_done_callback(engine.ended_early)
        open_things.callback(task.cancel)

    if surroundings.make_desk is not None:
        desk = surroundings.make_desk()
        # Closed after everything else: it has the last word.
        open_things.push_async_callback(desk.close)
        engine.service.use_desk(desk)
        listen_to(take_plans(desk, engine.driver))
    if surroundings.make_platform is not None:
        platform = surroundings.make_platform(engine.running_nodes())
        open_things.push_async_callback(platform.close)
        engine.service.use_platform(platform)
        listen_to(watch_platform(platform, engine.driver))


async def watch_platform(platform: Platform, driver: Driver) -> None:
    """Tell the core what the platform sees, for as long as this runs."""
    async for seen in platform.watch():
        driver.feed(ev.NodeSeen(seen.node_id, seen.phase, seen.reason, seen.message, seen.host))


async def take_plans(desk: Desk, driver: Driver) -> None:
    """Tell the core what people ask for, until they delete the job."""
    async for plan in desk.plans():
        driver.feed(ev.PlanAsked(plan))
    driver.feed(ev.StopRequested(-1, 0, "the job was deleted"))


def _stop_on_signals(
    engine: Engine, neighbours: Neighbours, line: int, *, hands_over: bool, is_managed: bool
) -> "asyncio.Future[m.JobEnded | None]":
    """A stopped master stops its job, unless it hands it over: then the future is done.

    Its nodes bring what they hold in memory to storage and leave; a later master on the same state
    goes on with the job.
    """
    handed_over: asyncio.Future[m.JobEnded | None] = asyncio.get_running_loop().create_future()
    patience = Patience()

    def stop(reason: str, number: signal.Signals, *, at_once: bool) -> None:
        engine.driver.feed(ev.StopRequested(-1, 0, reason, stopped=number))
        engine.driver.limit_patience()
        if at_once:
            engine.service.cut_farewell_short()

    def stopped(number: signal.Signals) -> None:
        if not hands_over:
            stop(f"it was stopped by {number.name}", number, at_once=patience.is_over(number))
        elif not handed_over.done():
            engine.driver.limit_patience()
            handed_over.set_result(None)

    def gone(at_once: bool) -> None:
        # The agent may have been the launcher itself, and have died with it.
        if not (engine.service.is_finishing or is_managed):
            neighbours.look(follow=True)
        stop("the launcher of the job is gone", signal.SIGHUP, at_once=at_once)

    on_end_signals(stopped)
    lifeline.watch(line, gone)
    return handed_over
