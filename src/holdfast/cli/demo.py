# SPDX-License-Identifier: Apache-2.0
"""`holdfast demo`: a job on this machine that is killed three times and goes on."""

import argparse
import asyncio
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.live import Live

from holdfast.cli import demo_screen as screen
from holdfast.cli.demo_curve import committed, first_after
from holdfast.cli.demo_job import NODES, DemoJob, Folders, Watch, kill
from holdfast.cli.demo_report import Kill, Report, Victim, make_report
from holdfast.model.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.runtime.signals import on_end_signals

LIMIT_S = 110
QUIET_S = 4.0
"""How long the job steps undisturbed before the next kill."""
WARM_S = 30.0
"""How long to wait for its spares; after that the kill is followed by a cold start."""
POLL_S = 0.05
FRAME_S = 0.25
SILENCE_S = 1.0
"""A master without an answer for this long is shown as gone."""
PLAIN_STEPS = 25

_TOLD = {"NodeReady", "NodeLost", "NodeOrdered", "WorldFormed", "WorldStarted"}


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        help=summary,
        description="Train a small character-level transformer on two local nodes with one worker "
        "each, kill a worker, a node and the master while it runs, and show how it goes on: live, "
        "and at the end with the loss curve, the time of every recovery and the goodput.",
        epilog="It takes about a minute on two idle cores. "
        "Exit codes: 0 the job survived with an unbroken loss curve, 1 it did not, 2 usage.",
        examples=("holdfast demo", "holdfast demo --plain --keep demo-run"),
        allow_abbrev=False,
    )
    parser.add_argument(
        "--plain", action="store_true", help="lines instead of a live screen (default: no terminal)"
    )
    parser.add_argument(
        "--steps", type=_positive, default=100, metavar="N", help="train at least N steps (100)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep metrics, checkpoint and logs in DIR"
    )
    parser.add_argument(
        "--limit",
        type=_positive,
        default=LIMIT_S,
        metavar="S",
        help=f"give up after S seconds ({LIMIT_S}): a busy machine may need more",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome to FILE")
    parser.set_defaults(run=_run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    is_live = console.is_terminal and not arguments.plain
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise UsageError(f"--json {arguments.json}: its folder does not exist")
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-", ignore_cleanup_errors=True) as name:
        results = _results_folder(arguments.keep, Path(name))
        folders = Folders(private=Path(name), results=results)
        job = DemoJob(f"demo-{secrets.token_hex(2)}", folders, arguments.steps)
        show = Demo(job, console, is_live=is_live, limit_s=arguments.limit)
        report = asyncio.run(_run_or_stop(show))
        if isinstance(report, signal.Signals):
            console.print("stopped; nothing is left of the job")
            return 128 + report
        if is_live:
            for event in show.events:
                console.print(screen.plain(event), style=event.style, markup=False)
        console.print()
        console.print(screen.last_page(report, show.marks(), console))
        if report.failure and (words := job.last_words()):
            words = f"\nThe last lines of the launcher:\n{words}"
            console.print(words, style="dim", markup=False, soft_wrap=True)
    if arguments.json is not None:
        arguments.json.write_bytes(msgspec.json.encode(report) + b"\n")
    if arguments.keep is not None:
        console.print(
            f"metrics, checkpoint and logs are in {arguments.keep}", style="dim", soft_wrap=True
        )
    return 1 if report.failure else 0


def _results_folder(keep: Path | None, private: Path) -> Path:
    """A folder without files of another run: the script would go on from its checkpoint."""
    if keep is None:
        keep = private / "results"
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise UsageError(f"--keep {keep} is not empty")
    except OSError as exc:
        raise UsageError(f"--keep {keep}: {exc.strerror}") from exc
    return keep.absolute()


async def _run_or_stop(show: "Demo") -> Report | signal.Signals:
    """The report, or the signal that stopped the demo. Afterwards nothing of the demo runs."""
    task = asyncio.ensure_future(show.run())
    caught: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if not caught:  # An impatient second Ctrl-C must not cut the cleaning up short.
            task.cancel()
        caught.append(number)

    on_end_signals(stop)
    try:
        return await task
    except asyncio.CancelledError:
        if not caught:
            raise
        return caught[0]


class _EndedError(Exception):
    """The job ended before the demo had done all its kills."""


class Demo:
    """Runs the job, does the kills and tells what happens."""

    def __init__(self, job: DemoJob, console: Console, *, is_live: bool, limit_s: int) -> None:
        self._job = job
        self._console = console
        self._is_live = is_live
        self._limit_s = limit_s
        self._started_at = time.monotonic()
        self._now = "starting two nodes"
        self._next_step_line = PLAIN_STEPS
        self._watch = Watch(job.name, self._heard)
        self.events: list[screen.Event] = []
        self.kills: list[Kill] = []

    async def run(self) -> Report:
        """Run the whole demo. The job is gone afterwards, whatever happens."""
        failure = ""
        watching = asyncio.create_task(self._watch.run())
        drawing = asyncio.create_task(self._draw())
        try:
            async with asyncio.timeout(self._limit_s):
                await self._job.start()
                await self._act()
        except TimeoutError:
            failure = f"after {self._limit_s} s it had only come to this: {self._now}"
        except _EndedError as ended:
            failure = str(ended)
        finally:
            self._now = "cleaning up"
            await self._job.stop()
            for task in (watching, drawing):
                task.cancel()
            await asyncio.gather(watching, drawing, return_exceptions=True)
        self._job.read_steps()
        return make_report(
            failure=failure,
            started_at=self._started_at,
            took_s=time.monotonic() - self._started_at,
            lines=self._job.lines,
            kills=self.kills,
            view=self._watch.view,
        )

    def marks(self) -> list[screen.Mark]:
        return [screen.Mark(kill.step, str(kill.victim)) for kill in self.kills]

    # ---- the three acts --------------------------------------------------------------------------

    async def _act(self) -> None:
        await self._until("starting two nodes", lambda: bool(self._job.lines))
        self._tell("the first step is finished", screen.GOOD_STYLE)
        await self._kill_worker()
        await self._kill_node()
        await self._kill_master()
        await self._calm("the last steps are done")
        self._job.folders.enough.touch()
        self._now = "the job finishes"
        while self._job.exit_code is None:
            await asyncio.sleep(POLL_S)
        if self._job.exit_code != 0:
            raise _EndedError(f"the job ended with exit code {self._job.exit_code}")

    async def _kill_worker(self) -> None:
        await self._calm("soon a worker is killed")
        rank, pid = max(self._job.workers().items())
        self._kill(Victim.WORKER, f"worker of rank {rank}", pid)
        await self._recovered()

    async def _kill_node(self) -> None:
        await self._calm("soon a node is killed")
        # Rank 0's agent, because rank 0 saves, and its loss hurts most.
        agent = self._job.agent_of(self._job.workers()[0])
        self._kill(Victim.NODE, "node of rank 0", agent)
        await self._recovered()

    async def _kill_master(self) -> None:
        await self._calm("soon the master is killed")
        self._kill(Victim.MASTER, "master", self._job.master_pid())
        killed = self.kills[-1]
        before = self._watch.generation
        asked = "a new master takes over; the workers train on"
        await self._until(asked, lambda: self._watch.generation > before)
        killed.back_at, generation = self._watch.answered_at, self._watch.generation
        after = f"{killed.back_at - killed.at:.2f} s after the kill"
        self._tell(f"a new master serves as generation {generation}, {after}", screen.GOOD_STYLE)

    def _kill(self, victim: Victim, who: str, pid: int) -> None:
        newest = self._job.lines[-1]
        workers = self._job.workers()
        killed = Kill(
            victim=victim,
            who=who,
            pid=pid,
            at=kill(pid),
            round=max(line.round for line in self._job.lines),
            step=newest.step,
            workers=workers,
        )
        self.kills.append(killed)
        self._tell(f"SIGKILL to the {who} (process {pid}) at step {newest.step}", screen.KILL_STYLE)

    async def _recovered(self) -> None:
        """Wait for the first step of a later round, and tell how long it took."""
        killed = self.kills[-1]
        what = f"the job recovers from the loss of the {killed.who}"

        def following() -> bool:
            return first_after(self._job.lines, killed.at, round_above=killed.round) is not None

        await self._until(what, following)
        line = first_after(self._job.lines, killed.at, round_above=killed.round)
        assert line is not None
        took = f"{line.t - killed.at:.2f} s after the kill"
        world = "1 worker" if line.world == 1 else f"{line.world} workers"
        self._tell(f"step {line.step} is finished, {took}, by {world}", screen.GOOD_STYLE)

    async def _calm(self, next_act: str) -> None:
        """Wait until the world is whole, has stepped for a while, and its spares are ready."""
        since, beginning = 0.0, time.monotonic()
        newest_round, is_warm, looked_at = -1, False, 0.0

        def is_calm() -> bool:
            nonlocal since, newest_round, is_warm, looked_at
            now, line = time.monotonic(), self._job.lines[-1]
            if line.round != newest_round or line.world != NODES:
                newest_round, since = line.round, now
            if now - looked_at > 10 * POLL_S:
                is_warm, looked_at = self._job.is_warm(), now
            waited_s = now - max(since, beginning)
            return waited_s > QUIET_S and line.t > since and (is_warm or waited_s > WARM_S)

        await self._until(f"training, spares get ready: {next_act}", is_calm)

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        self._now = what
        while True:
            self._job.read_steps()
            if condition():
                return
            if self._job.exit_code is not None:
                raise _EndedError(f"the job ended too early, at this point: {what}")
            await asyncio.sleep(POLL_S)

    # ---- telling it ------------------------------------------------------------------------------

    def _heard(self, story: m.Story) -> None:
        if story.kind == "IncidentClosed":
            # The whole time is computed from the steps themselves.
            self._tell(f"stages: {story.text.partition('(')[2].rstrip(')') or story.text}")
        elif story.kind in _TOLD:
            self._tell(story.text)

    def _tell(self, text: str, style: str = "") -> None:
        event = screen.Event(time.monotonic() - self._started_at, text, style)
        self.events.append(event)
        if not self._is_live:
            self._console.print(screen.plain(event), markup=False, soft_wrap=True)

    async def _draw(self) -> None:
        """Keep the screen up to date; without a screen, report now and then how far training is."""
        if not self._is_live:
            while True:
                await asyncio.sleep(FRAME_S)
                lines = self._job.lines
                if lines and lines[-1].step >= self._next_step_line:
                    self._next_step_line = lines[-1].step // PLAIN_STEPS * PLAIN_STEPS + PLAIN_STEPS
                    self._tell(f"step {lines[-1].step}, loss {lines[-1].loss:.3f}")
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(screen.frame(self._picture(), self._console), refresh=True)
                await asyncio.sleep(FRAME_S)

    def _picture(self) -> screen.Picture:
        now, view = time.monotonic(), self._watch.view
        alive = [("master", now - self._watch.answered_at < SILENCE_S)]
        world = ""
        if view is not None:
            running = {node.node_rank for node in view.nodes if node.phase == "running"}
            alive += [(f"node {rank}", rank in running) for rank in range(NODES)]
            workers = sorted(self._job.workers().items())
            alive += [(f"rank {rank}", psutil.pid_exists(pid)) for rank, pid in workers]
            world = f"round {view.world.round}, generation {view.world.generation}"
        return screen.Picture(
            clock_s=now - self._started_at,
            alive=tuple(alive),
            world=world,
            losses=[line.loss for line in committed(self._job.lines).steps],
            marks=self.marks(),
            events=self.events,
            now=self._now,
        )
