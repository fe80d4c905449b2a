# SPDX-License-Identifier: Apache-2.0
"""`holdfast status`: what a job does, where its time went, and the story of every incident."""

import argparse
import asyncio
import time
from collections.abc import Callable

import msgspec
import uvloop
from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holdfast.cli import asking
from holdfast.cli.words import count, duration, plain, speed
from holdfast.master.process import view_left
from holdfast.master.view import (
    CheckpointsView,
    IncidentView,
    JobView,
    NodeView,
    SavingView,
    WorldView,
)
from holdfast.model.errors import RejectedError, RetryableError, UsageError
from holdfast.protocol import messages as m

NODES_SHOWN = 40
LOGS_NAMED = 8
WIDE = 80
"""From this width on the node table has room for columns that few people need."""

_STAGES = ("detect", "rendezvous", "restart", "restore")
_STATE_STYLES = {"running": "bold green", "succeeded": "bold green", "failed": "bold red"}


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "status",
        help=summary,
        description="Show a job: its nodes and world, its step and goodput, and how long every "
        "recovery took. Without options it shows the only job that runs on this machine; with "
        "--state also one whose master is gone, as its journal has it.",
        epilog="Exit codes: 0 shown, 1 the master cannot be reached, 2 usage.",
        examples=(
            "holdfast status",
            "holdfast status --follow",
            "holdfast status --state /shared/bert --json",
            "holdfast status --history node/3",
        ),
        allow_abbrev=False,
    )
    asking.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the state as one line of JSON")
    parser.add_argument(
        "--follow", action="store_true", help="then print what happens, until the job ends"
    )
    parser.add_argument(
        "--history",
        metavar="ENTITY",
        help="print what happened to one node, round, step or dataset instead: node/3 (by its "
        "rank), ps/0, round/7, step/100, dataset/train",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.history is not None:
        return _show_history(arguments)
    http = ""

    def show(state: bytes) -> None:
        if arguments.json:
            print(state.decode(), flush=True)
        else:
            print_view(Console(highlight=False), asking.decode(state), http)
            if arguments.follow:
                print(flush=True)

    try:
        target = asking.target_of(arguments)
    except RetryableError:
        if arguments.state is None or arguments.follow:
            raise
        # After the end, and after a crash, people look for this later.
        show(msgspec.json.encode(view_left(arguments.state)))
        return 0
    http = target.http

    tell: Callable[[m.Story], None] = _print_story_json if arguments.json else _print_story
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            told = tell if arguments.follow else None
            runner.run(asking.watch(target, arguments.timeout, show, told))
    except KeyboardInterrupt:
        if not arguments.follow:
            raise
    return 0


def _show_history(arguments: argparse.Namespace) -> int:
    if arguments.follow:
        raise UsageError("--history shows what has happened: leave out --follow")
    entity, target = arguments.history.strip("/"), asking.target_of(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(asking.history(target, arguments.timeout, entity))
    if not found.stories:
        there_are = f"; there is {', '.join(found.entities)}" if found.entities else ""
        raise RejectedError(f"this master has told nothing of {entity!r}{there_are}")
    for story in found.stories:
        (_print_story_json if arguments.json else _print_story)(story)
    return 0


# ---- showing it ----------------------------------------------------------------------------------


def _print_story_json(story: m.Story) -> None:
    about = {"at_s": round(story.at_s, 3), "kind": story.kind, "text": story.text}
    line = {**about, **story.fields}
    print(msgspec.json.encode(line).decode(), flush=True)


def _print_story(story: m.Story) -> None:
    when, text = f"{duration(story.at_s):>12}", plain(story.text)
    console = Console(highlight=False)
    if not console.is_terminal:
        print(f"{when}  {text}", flush=True)  # Whole lines, for grep.
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_row(when, Text(text))
    console.print(grid)


def print_view(console: Console, job: JobView, http: str) -> None:
    """The whole job. Fits into 60 columns: long values are folded, and nothing is cut."""
    summary = _summary(job)
    if http:
        summary.add_row("http", f"http://{http}")
    console.print(summary)
    if job.nodes:
        console.print()
        console.print(_node_table(job, console.width))
        if len(job.nodes) > NODES_SHOWN:
            console.print(f"and {len(job.nodes) - NODES_SHOWN} more nodes: see --json", style="dim")
        for line in _logs(job.nodes):
            console.print(line)
    for incident in job.progress.incidents:
        console.print()
        for part in _incident(incident):
            console.print(part)


def _summary(job: JobView) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    is_running = job.state == "running" and not job.from_journal
    shown = "not ended" if job.state == "running" and job.from_journal else job.state
    state = Text(plain(job.job), style="bold")
    state.append("  ")
    state.append(plain(shown), style=_STATE_STYLES.get(shown, ""))
    word, now = ("for", f", now: {job.progress.stage}") if is_running else ("after", "")
    state.append(f" {word} {duration(job.time_s)}{plain(now)}", style="not bold")
    grid.add_row("job", state)
    if job.from_journal:
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(job.wall_s))
        left = f"no master runs here; from its journal, as of {when}"
        grid.add_row("", Text(left, style="yellow"))
    if job.reason:
        grid.add_row("", Text(plain(job.reason)))
    grid.add_row("world", Text(_world(job.world)))
    if job.world.reason:
        grid.add_row("", Text(f"because {plain(job.world.reason)}", style="dim"))
    progress = job.progress
    if progress.step >= 0 or progress.steps_total:
        reached = f"{progress.step:,}" if progress.step >= 0 else "not reported"
        of = f" of {progress.steps_wanted:,}" if progress.steps_wanted else ""
        done = f"{progress.steps_total:,} finished, those done again included"
        grid.add_row("step", f"{reached}{of} ({done})")
    if progress.steps_per_s is not None:
        left = "" if progress.left_s is None else f", {duration(progress.left_s)} left"
        grid.add_row("speed", f"{speed(progress.steps_per_s)}{left}")
    share = "not known before the first step"
    if progress.goodput is not None:
        share = f"{progress.goodput:.1%} of the time"
    grid.add_row("goodput", f"{share}{_spent(progress.seconds)}")
    if job.restarts:
        counts = ", ".join(f"{count} {plain(reason)}" for reason, count in job.restarts.items())
        grid.add_row("restarts", Text(counts))
    for number, checkpoints in enumerate(job.checkpoints):
        grid.add_row("" if number else "checkpoints", Text(_checkpoints(checkpoints)))
        if checkpoints.problem:
            grid.add_row("", Text(plain(checkpoints.problem), style="yellow"))
    if job.saving.failed_saves:
        grid.add_row("not saved", Text(_not_saved(job.saving), style="yellow"))
    return grid


def _world(world: WorldView) -> str:
    if not world.nodes:
        text = f"{plain(world.state) or 'none'} (generation {world.generation})"
    else:
        text = (
            f"round {world.round}, generation {world.generation}, {plain(world.state)}: "
            f"{count(len(world.nodes), 'node')}, {count(world.world_size, 'worker')}"
        )
    if world.spares:
        text += f", {count(len(world.spares), 'spare')}"
    if world.starts_in_s > 0:
        text += f"; the next round starts in {duration(world.starts_in_s)}"
    return text


def _checkpoints(view: CheckpointsView) -> str:
    """The state of one directory."""
    parts = [f"step {view.committed:,} committed" if view.committed >= 0 else "none committed"]
    if view.writing >= 0:
        parts.append(f"step {view.writing:,} on its way ({plain(view.reason)})")
    if view.safe >= 0:
        as_of = "" if view.safe_confirmed else " (as of before the incident)"
        parts.append(f"step {view.safe:,} safe on other nodes{as_of}")
    return f"{plain(view.directory)}: {', '.join(parts)}"


def _not_saved(saving: SavingView) -> str:
    """How often a node could not save, and the latest reason."""
    times = count(saving.failed_saves, "time")
    return f"{times}, at last step {saving.failed_step:,}: {plain(saving.failed_why)}"


def _spent(seconds: dict[str, float]) -> str:
    """Where the time went, without the uses that took none."""
    used = [f"{plain(use)} {duration(s)}" for use, s in seconds.items() if s >= 0.05]
    return f": {', '.join(used)}" if used else ""


def _node_table(job: JobView, width: int) -> Table:
    """Use, speed and beat are those of the last beat. Only the host may take a second line."""
    is_wide = width >= WIDE
    table = Table(box=None, padding=(0, 2 if is_wide else 1, 0, 0), header_style="dim")
    for heading in ("rank", "id", "workers") if is_wide else ("rank",):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("state", "start"):
        table.add_column(heading, no_wrap=True)
    for heading in ("cores", "memory", "steps/s", "beat"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("host", overflow="fold")
    for node in job.nodes[:NODES_SHOWN]:
        is_live = node.phase == "running"
        table.add_row(
            str(node.node_rank),
            *((str(node.node_id), str(node.nproc)) if is_wide else ()),
            Text(_part(node, job.world) or plain(node.phase), style="" if is_live else "dim"),
            {True: "warm", False: "cold", None: ""}[node.warm],
            "" if node.cpu is None else f"{node.cpu:.1f}",
            "" if node.memory_bytes is None else decimal(node.memory_bytes),
            "" if node.steps_per_s is None else f"{node.steps_per_s:.2f}",
            "" if node.beat_age_s is None else f"{node.beat_age_s:.1f} s",
            Text(plain(node.host)),
        )
    return table


def _part(node: NodeView, world: WorldView) -> str:
    """The part of a live node in the world."""
    if node.phase != "running":
        return ""
    if node.node_rank in world.nodes:
        return "member"
    return "spare" if node.node_rank in world.spares else ""


def _logs(nodes: tuple[NodeView, ...]) -> list[Text]:
    """The folders with the output of the nodes' workers, each once."""
    ranks: dict[str, list[int]] = {}
    for node in nodes:
        if node.log_dir:
            ranks.setdefault(plain(node.log_dir), []).append(node.node_rank)
    lines = []
    for folder, found in ranks.items():
        few = ", ".join(map(str, found[:LOGS_NAMED])) + (", ..." if found[LOGS_NAMED:] else "")
        whose = "logs" if len(ranks) == 1 else f"logs of {few}"
        lines.append(Text(f"{whose}: ", style="dim").append(folder, style="not dim"))
    return lines


def _incident(incident: IncidentView) -> list[RenderableType]:
    """Two lines: what happened, and how long each stage of the recovery took."""
    head = Text(f"incident {incident.number}", style="bold")
    head.append(f"  at {duration(incident.at_s)}, round {incident.round}: ", style="not bold dim")
    head.append(plain(incident.reason), style="not bold")
    # Milliseconds while they matter; both forms fit a line of 80 columns.
    digits = 3 if incident.recovery_s < 10 else 1
    stages = ", ".join(
        f"{name} {incident.stages[name]:.{digits}f}" for name in _STAGES if name in incident.stages
    )
    if incident.closed:
        line = Text(f"recovery {incident.recovery_s:.{digits}f} s: {stages}")
    else:
        now = f"now {plain(incident.part or incident.stage)} for {duration(incident.stage_s)}"
        line = Text(f"not over after {duration(incident.open_s)}, {now}: {stages}", style="yellow")
    return [head, Padding(line, (0, 0, 0, 2))]
