# SPDX-License-Identifier: Apache-2.0
"""`holdfast status`: what a job does, where its time went, and the story of every incident."""

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holdfast.cli.run_options import parse_address
from holdfast.master import notes
from holdfast.master.view import CheckpointsView, IncidentView, JobView, NodeView, WorldView
from holdfast.model.errors import HoldfastError, ProtocolError, RetryableError, UsageError
from holdfast.protocol import messages as m
from holdfast.runtime.settings import environment
from holdfast.runtime.tls import client_tls
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, connect

NODES_SHOWN = 40
_STAGES = ("detect", "rendezvous", "restart", "restore")
_STATE_STYLES = {"running": "bold green", "succeeded": "bold green", "failed": "bold red"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "status",
        help="show a job: nodes, world, step, goodput and incidents",
        description="Show a job: its nodes and world, its step and goodput, and how long every "
        "recovery took. Without options it shows the only job that runs on this machine.",
        epilog="Exit codes: 0 shown, 1 the master cannot be reached, 2 usage.",
        allow_abbrev=False,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--job", metavar="NAME", help="a job that runs on this machine")
    which.add_argument("--state", type=Path, metavar="DIR", help="the job of this state directory")
    which.add_argument("--master", metavar="HOST:PORT", help="a master anywhere")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the job's token, for --master (default HOLDFAST_TOKEN_FILE)",
    )
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="authority of the master's certificate (PEM)"
    )
    parser.add_argument("--json", action="store_true", help="print the state as one line of JSON")
    parser.add_argument(
        "--follow", action="store_true", help="then print what happens, until the job ends"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds to wait for the master (default 5)",
    )
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds above 0, not {text!r}")
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    target = _target(arguments)

    def show(state: bytes) -> None:
        if arguments.json:
            print(state.decode(), flush=True)
        else:
            _print_view(state, target.http)
            if arguments.follow:
                print(flush=True)

    tell: Callable[[m.Story], None] = _print_story_json if arguments.json else _print_story
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_watch(target, arguments.timeout, show, tell if arguments.follow else None))
    except KeyboardInterrupt:
        if not arguments.follow:
            raise
    return 0


# ---- finding the master --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Target:
    address: str
    token_file: Path
    tls_ca: Path | None
    http: str = ""
    """Where its HTTP side is; empty if that is off or unknown."""


def _target(arguments: argparse.Namespace) -> _Target:
    if arguments.master is not None:
        parse_address(arguments.master, "--master")
        token_file = arguments.token_file or environment().get("HOLDFAST_TOKEN_FILE")
        if not token_file:
            raise UsageError("--master needs --token-file FILE (or HOLDFAST_TOKEN_FILE)")
        return _Target(arguments.master, Path(token_file), arguments.tls_ca)
    if arguments.state is not None:
        note = _note_of(arguments.state)
    else:
        note = notes.find(arguments.job)
    token_file = arguments.token_file or Path(note.token_file)
    return _Target(note.address, token_file, arguments.tls_ca, note.http)


def _note_of(state: Path) -> notes.Note:
    if not state.is_dir():
        raise UsageError(f"--state {state} is not a directory")
    for note in notes.read_all():
        if Path(note.state).resolve() == state.resolve():
            return note
    raise RetryableError(f"no master runs on {state} on this machine")


# ---- asking it -----------------------------------------------------------------------------------


class _Observer:
    """The client's end of the link: one answer, then stories until the link ends."""

    CALL = 1

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.stories: asyncio.Queue[m.Story | None] = asyncio.Queue()

    def opened(self, link: Link) -> None:
        """Only servers are told."""

    def received(self, link: Link, frame: m.Frame) -> None:
        match frame.body:
            case m.Observed(state=state) if not self.answer.done():
                self.answer.set_result(state)
            case m.Story():
                self.stories.put_nowait(frame.body)
            case other:
                raise ProtocolError(f"{type(other).__name__} came to an observer")

    def closed(self, link: Link) -> None:
        if not self.answer.done():
            self.answer.set_exception(RetryableError("the master hung up before it answered"))
        self.stories.put_nowait(None)


async def _watch(
    target: _Target,
    timeout_s: float,
    show: Callable[[bytes], None],
    tell: Callable[[m.Story], None] | None,
) -> None:
    """Show the state; with `tell`, tell every story after it until the job or the link ends."""
    token, tls = read_token(target.token_file), client_tls(target.tls_ca)
    observer = _Observer()
    try:
        async with asyncio.timeout(timeout_s):
            link = await connect(target.address, observer, token, tls=tls, timeout_s=timeout_s)
            link.send(m.Observe(follow=tell is not None), _Observer.CALL)
            state = await observer.answer
    except TimeoutError:
        raise _unreachable(target, f"no answer within {timeout_s:g} s") from None
    except HoldfastError as exc:
        raise _unreachable(target, str(exc).removeprefix(f"{target.address}: ")) from exc
    try:
        show(state)
        if tell is not None:
            await _tell_all(observer, tell)
    finally:
        link.abort()


async def _tell_all(observer: _Observer, tell: Callable[[m.Story], None]) -> None:
    while (story := await observer.stories.get()) is not None:
        if story.kind == "Progress":
            continue  # Once a second: for a status line, not for a list of what happened.
        tell(story)
        if story.kind == "JobFinished":
            return
    raise RetryableError("the master is gone, but its job may go on: ask again when it is back")


def _unreachable(target: _Target, why: str) -> RetryableError:
    hint = ""
    if target.tls_ca is None and ("no answer" in why or "broke" in why):
        hint = "; if it uses TLS, give --tls-ca FILE"
    return RetryableError(f"cannot reach the master at {target.address}: {why}{hint}")


# ---- showing it ----------------------------------------------------------------------------------


def _print_story_json(story: m.Story) -> None:
    line = {"at_s": round(story.at_s, 3), "kind": story.kind, "text": story.text}
    print(msgspec.json.encode(line).decode(), flush=True)


def _print_story(story: m.Story) -> None:
    when, text = f"{_duration(story.at_s):>12}", _plain(story.text)
    console = Console(highlight=False)
    if not console.is_terminal:
        print(f"{when}  {text}", flush=True)  # Whole lines, for grep.
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_row(when, Text(text))
    console.print(grid)


def _print_view(state: bytes, http: str) -> None:
    try:
        job = msgspec.json.decode(state, type=JobView)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"the master's state cannot be understood: {exc}") from exc
    console = Console(highlight=False)
    summary = _summary(job)
    if http:
        summary.add_row("http", f"http://{http}")
    console.print(summary)
    if job.nodes:
        console.print()
        console.print(_node_table(job))
        if len(job.nodes) > NODES_SHOWN:
            console.print(f"and {len(job.nodes) - NODES_SHOWN} more nodes: see --json", style="dim")
    for incident in job.progress.incidents:
        console.print()
        for part in _incident(incident):
            console.print(part)


def _summary(job: JobView) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    is_running = job.state == "running"
    state = Text(_plain(job.job), style="bold")
    state.append("  ")
    state.append(_plain(job.state), style=_STATE_STYLES.get(job.state, ""))
    word, now = ("for", f", now: {job.progress.stage}") if is_running else ("after", "")
    state.append(f" {word} {_duration(job.time_s)}{_plain(now)}", style="not bold")
    grid.add_row("job", state)
    if job.reason:
        grid.add_row("", Text(_plain(job.reason)))
    grid.add_row("world", Text(_world(job.world)))
    if job.world.reason:
        grid.add_row("", Text(f"because {_plain(job.world.reason)}", style="dim"))
    progress = job.progress
    if progress.step >= 0 or progress.steps_total:
        reached = f"{progress.step:,}" if progress.step >= 0 else "not reported"
        done = f"{progress.steps_total:,} finished, those done again included"
        grid.add_row("step", f"{reached} ({done})")
    grid.add_row("goodput", f"{progress.goodput:.1%}{_spent(progress.seconds)}")
    if job.restarts:
        counts = ", ".join(f"{count} {_plain(reason)}" for reason, count in job.restarts.items())
        grid.add_row("restarts", Text(counts))
    for number, checkpoints in enumerate(job.checkpoints):
        grid.add_row("" if number else "checkpoints", Text(_checkpoints(checkpoints)))
        if checkpoints.problem:
            grid.add_row("", Text(_plain(checkpoints.problem), style="yellow"))
    return grid


def _world(world: WorldView) -> str:
    if not world.nodes:
        text = f"{_plain(world.state) or 'none'} (generation {world.generation})"
    else:
        text = (
            f"round {world.round}, generation {world.generation}, {_plain(world.state)}: "
            f"{_count(len(world.nodes), 'node')}, {_count(world.world_size, 'worker')}"
        )
    if world.spares:
        text += f", {_count(len(world.spares), 'spare')}"
    return text


def _checkpoints(view: CheckpointsView) -> str:
    """Where one directory stands."""
    parts = [f"step {view.committed:,} committed" if view.committed >= 0 else "none committed"]
    if view.writing >= 0:
        parts.append(f"step {view.writing:,} on its way ({_plain(view.reason)})")
    if view.safe >= 0:
        parts.append(f"step {view.safe:,} safe on other nodes")
    return f"{_plain(view.directory)}: {', '.join(parts)}"


def _spent(seconds: dict[str, float]) -> str:
    """Where the time went, without the uses that took none."""
    used = [f"{_plain(use)} {_duration(s)}" for use, s in seconds.items() if s >= 0.05]
    return f" of the time: {', '.join(used)}" if used else ""


def _node_table(job: JobView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("node rank", "node id", "incarnation", "workers"):
        table.add_column(heading, justify="right")
    for heading in ("phase", "world", "host"):
        table.add_column(heading)
    for node in job.nodes[:NODES_SHOWN]:
        is_live = node.phase == "running"
        table.add_row(
            str(node.node_rank),
            str(node.node_id),
            str(node.incarnation),
            str(node.nproc),
            Text(_plain(node.phase), style="" if is_live else "dim"),
            _part(node, job.world) if is_live else "",
            Text(_plain(node.host)),
        )
    return table


def _part(node: NodeView, world: WorldView) -> str:
    """What a live node does in the world."""
    if node.node_rank in world.nodes:
        return "member"
    return "spare" if node.node_rank in world.spares else ""


def _incident(incident: IncidentView) -> list[RenderableType]:
    """Two lines: what happened, and how long each stage of the recovery took."""
    head = Text(f"incident {incident.number}", style="bold")
    head.append(f"  at {_duration(incident.at_s)}, round {incident.round}: ", style="not bold dim")
    head.append(_plain(incident.reason), style="not bold")
    # Milliseconds while they matter; both forms fit a line of 80 columns.
    digits = 3 if incident.recovery_s < 10 else 1
    stages = ", ".join(
        f"{name} {incident.stages[name]:.{digits}f}" for name in _STAGES if name in incident.stages
    )
    if incident.closed:
        line = Text(f"recovery {incident.recovery_s:.{digits}f} s: {stages}")
    else:
        line = Text(f"not over, so far: {stages}", style="yellow")
    return [head, Padding(line, (0, 0, 0, 2))]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def _plain(text: str) -> str:
    """Text from elsewhere on one line and without anything that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)
