# SPDX-License-Identifier: Apache-2.0
"""What the demo looks like: a live screen on a terminal, lines elsewhere, and the last page."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holdfast.cli.demo_job import SAVE_EVERY
from holdfast.cli.demo_report import Interruption, Report

STAGES = ("detect", "rendezvous", "restart", "restore")
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_AXIS = 6
"""Columns left of the plot, for the numbers of its axis."""
_BAR = 46
"""Columns of a bar for the whole time."""

KILL_STYLE = "bold red"
GOOD_STYLE = "green"


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the timeline."""

    at_s: float
    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A kill under the plot."""

    step: int
    label: str


# ---- the loss curve ------------------------------------------------------------------------------


def loss_plot(
    losses: Sequence[float], marks: Sequence[Mark], *, width: int, height: int
) -> list[Text]:
    """Bars of eighths of a character over the steps from 1 on, and below them the kills."""
    columns = max(1, min(width - _AXIS - 1, len(losses)))
    per_column = len(losses) / columns
    bins = [
        fmean(losses[int(i * per_column) : max(int((i + 1) * per_column), int(i * per_column) + 1)])
        for i in range(columns)
    ]
    top = max(bins)
    rows = []
    for row in range(height - 1, -1, -1):
        label = {height - 1: f"{top:.1f}", 0: "0.0"}.get(row, "")
        text = Text(f"{label:>{_AXIS - 1}} ", style="dim")
        text.append(
            "".join(_cell(value / top, row, height) for value in bins), style="not dim cyan"
        )
        rows.append(text)
    places = [(min(columns - 1, int((mark.step - 1) / per_column)), mark.label) for mark in marks]
    rows.append(_mark_row(places, width - _AXIS - 1))
    return rows


def _cell(share: float, row: int, height: int) -> str:
    eighths = round(share * height * 8) - row * 8
    return _EIGHTHS[min(8, max(0, eighths))]


def _mark_row(places: Sequence[tuple[int, str]], width: int) -> Text:
    """Each label right of its arrow, or left of it if the next arrow or the edge is near."""
    row = [" "] * width
    for column, _ in places:
        row[column] = "▲"
    for column, label in places:
        right = range(column + 2, column + 2 + len(label))
        left = range(column - 1 - len(label), column - 1)
        for place in (right, left):
            around = range(place.start - 1, place.stop + 1)
            if around.start >= 0 and place.stop <= width:
                free = all(row[i] == " " for i in around if i != column and i < width)
                if free:
                    row[place.start : place.stop] = label
                    break
    text = Text(" " * _AXIS)
    text.append("".join(row).rstrip(), style=KILL_STYLE)
    return text


# ---- while it runs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Everything that one frame of the live screen shows."""

    clock_s: float
    alive: tuple[tuple[str, bool], ...]
    """Name and health of each part of the job."""
    world: str
    losses: Sequence[float]
    marks: Sequence[Mark]
    events: Sequence[Event]
    now: str
    """What the demo waits for."""


def frame(picture: Picture, console: Console) -> RenderableType:
    """One frame, as large as the terminal."""
    width, height = console.size
    head = Text("holdfast demo", style="bold")
    reached = f"step {len(picture.losses)}  loss {picture.losses[-1]:.3f}" if picture.losses else ""
    right = f"{reached}   {picture.clock_s:5.1f} s"
    head.append(right.rjust(width - len(head) - 1), style="not bold")
    parts = Text()
    for name, is_alive in picture.alive:
        parts.append("● " if is_alive else "✗ ", style=GOOD_STYLE if is_alive else KILL_STYLE)
        parts.append(f"{name}   ", style="" if is_alive else KILL_STYLE)
    parts.append(picture.world, style="dim")
    plot_height = 6 if height < 32 else 12
    plot: list[Text]
    if picture.losses:
        plot = loss_plot(picture.losses, picture.marks, width=width, height=plot_height)
    else:
        plot = [Text("")] * plot_height + [Text("  no step yet: the workers import torch", "dim")]
    room = max(3, height - plot_height - 7)
    shown = [_event(event, width) for event in picture.events[-room:]]
    shown += [Text("")] * (room - len(shown))
    footer = Text(f"▸ {picture.now}", style="yellow", no_wrap=True, overflow="ellipsis")
    lines = [head, parts, Text(""), *plot, Text(""), *shown, footer]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _event(event: Event, width: int) -> Text:
    text = Text(f"{event.at_s:6.1f} s  ", style="dim")
    text.append(event.text, style=f"not dim {event.style}")
    text.truncate(width - 1, overflow="ellipsis")
    return text


def plain(event: Event) -> str:
    """One event, for output without a terminal."""
    return f"{event.at_s:6.1f} s  {event.text}"


# ---- the last page -------------------------------------------------------------------------------


def last_page(report: Report, marks: Sequence[Mark], console: Console) -> RenderableType:
    """The loss curve, the table of kills, where the time went, and the verdict."""
    width = min(console.width, 120)
    parts: list[RenderableType] = []
    if report.curve:
        title = f"loss over steps 1 to {report.steps}: "
        title += f"{report.loss_first:.2f} to {report.loss_last:.2f}, "
        title += "unbroken" if report.unbroken else "BROKEN"
        parts.append(Text(title, style="bold"))
        losses = [loss for _, loss in report.curve]
        parts += loss_plot(losses, marks, width=width, height=6)
    if report.interruptions:
        parts += [Text(""), _table(report.interruptions)]
        parts += [Padding(Text(line, style="dim"), (0, 0, 0, 1)) for line in _remarks(report)]
    if report.seconds:
        parts += [Text(""), _goodput(report)]
    parts += [Text(""), _verdict(report)]
    return Group(*parts)


def _table(rows: Sequence[Interruption]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    table.add_column("killed with SIGKILL", overflow="fold", min_width=19)
    for heading in ("next step", *STAGES, "redone"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        following = "never" if row.next_step_s is None else f"{row.next_step_s:.2f} s"
        what = Text(row.what if row.killed else f"└ {row.what}")
        if not row.killed:
            what.stylize("dim")
        table.add_row(
            what,
            Text(following, style="bold" if row.killed else ""),
            *(f"{row.stages[name]:.2f}" if name in row.stages else "-" for name in STAGES),
            str(row.steps_redone),
        )
    return table


def _remarks(report: Report) -> list[str]:
    lines = [
        f"redone: each step is in memory, every {SAVE_EVERY}th on storage too; "
        f"same losses within {report.worst_difference:.5f}"
    ]
    if report.master is not None:
        loss = report.master
        restarted = f"{loss.workers_restarted} workers restarted"
        lines.append(
            f"master: back in {loss.back_after_s:.2f} s, {restarted}, "
            f"slowest step {loss.slowest_step_s:.2f} s (median {loss.median_step_s:.2f})"
        )
    return lines


def _goodput(report: Report) -> Text:
    """One bar for the whole time, and the uses it is made of."""
    total_s = sum(report.seconds.values())
    productive = round(report.goodput * _BAR)
    text = Text(f"goodput {report.goodput:.1%} ", style="bold")
    text.append("█" * productive, style=GOOD_STYLE)
    text.append("░" * (_BAR - productive), style="yellow")
    text.append(f" of {total_s:.1f} s\n", style="not bold")
    spent = ", ".join(f"{use} {s:.1f} s" for use, s in report.seconds.items() if s >= 0.05)
    if report.curve:
        spent += f"; the first step came after {report.first_step_s:.1f} s"
    text.append(spent, style="not bold dim")
    return text


def _verdict(report: Report) -> Text:
    if report.failure:
        return Text(f"The demo failed: {report.failure}.", style=KILL_STYLE)
    return Text(
        f"The job survived all three kills: {report.steps} steps, each counted once, "
        f"in {report.took_s:.0f} s.",
        style=f"bold {GOOD_STYLE}",
    )
