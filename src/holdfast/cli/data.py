# SPDX-License-Identifier: Apache-2.0
"""`holdfast data`: how far a job is in its datasets, how fast it goes, and who reads what."""

import argparse

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli import asking
from holdfast.cli.words import count, duration, plain
from holdfast.master.view import DatasetView
from holdfast.model.dataset import LINES, LISTED, RANGE, STREAM
from holdfast.model.errors import UsageError

UNITS = {RANGE: "records", LINES: "bytes", STREAM: "offsets"}
"""The unit of a kind's samples."""
EXTENTS = {LINES: "file", STREAM: "partition", LISTED: "shard"}
"""What a piece of a kind is a part of."""


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "data",
        help=summary,
        description="Show how far a job is in the datasets that its workers read in shards.",
        examples=("holdfast data ls", "holdfast data show train --json"),
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb, run, text, words in (
        ("ls", _ls, "list the datasets", "--json"),
        ("show", _show, "show one dataset", "train"),
    ):
        one = verbs.add_parser(
            verb,
            help=text,
            description=text.capitalize() + " of a job.",
            epilog="Exit codes: 0 shown, 1 the master cannot be reached, 2 usage.",
            examples=(f"holdfast data {verb} {words}",),
            allow_abbrev=False,
        )
        if verb == "show":
            one.add_argument("name", metavar="NAME", help="the dataset")
        asking.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print one line of JSON")
        one.set_defaults(run=run)


def _datasets(arguments: argparse.Namespace) -> tuple[DatasetView, ...]:
    state = asking.ask(asking.target_of(arguments), arguments.timeout)
    return asking.decode(state).datasets


def _ls(arguments: argparse.Namespace) -> int:
    datasets = _datasets(arguments)
    if arguments.json:
        print(msgspec.json.encode(datasets).decode())
    elif not datasets:
        print("no worker of this job reads a dataset in shards")
    else:
        Console(highlight=False).print(table(datasets))
    return 0


def table(datasets: tuple[DatasetView, ...]) -> Table:
    """Fits into 60 columns: only a long name takes a second line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("dataset", overflow="fold")
    table.add_column("epoch", no_wrap=True)
    for heading in ("done", "rate", "left", "leases", "set aside"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in datasets:
        table.add_row(
            Text(plain(one.name)),
            _epoch(one),
            _share(one) or f"{one.consumed:,}",
            _rate(one),
            _left(one),
            f"{one.leases_total:,}",
            Text(f"{one.set_aside_total:,}", style="bold red" if one.set_aside_total else ""),
        )
    return table


def _show(arguments: argparse.Namespace) -> int:
    datasets = {one.name: one for one in _datasets(arguments)}
    found = datasets.get(arguments.name)
    if found is None:
        names = ", ".join(sorted(plain(name) for name in datasets)) or "none"
        raise UsageError(f"the job has no dataset {arguments.name!r}; it has: {names}")
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found)
    return 0


def _print(one: DatasetView) -> None:
    console = Console(highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("dataset", Text(plain(one.name), style="bold"))
    grid.add_row("kind", f"{plain(one.kind)}, for {plain(one.task)}")
    follows = plain(one.follows) or "nothing: after a failure samples may be read twice"
    grid.add_row("goes with", Text(follows))
    grid.add_row("epoch", _epoch(one))
    size = f" of {one.size:,}" if one.size >= 0 else ""
    share = f" ({_share(one)})" if _share(one) else ""
    unit = UNITS.get(one.kind, "samples")
    grid.add_row("consumed", f"{one.consumed:,}{size} {unit}{share}, {_rate(one)}")
    grid.add_row("epoch left", _left(one))
    grid.add_row("leases", f"{one.leases_total:,}")
    grid.add_row("came back", f"{count(one.open_total, 'piece')} for the next who asks")
    if one.problem:
        grid.add_row("problem", Text(plain(one.problem), style="yellow"))
    console.print(grid)
    if one.leases:
        console.print()
        console.print(_leases(one))
        _print_rest(console, one.leases_total - len(one.leases))
    if one.set_aside:
        console.print()
        console.print("set aside, because its readers failed again and again:", style="bold red")
        for piece in one.set_aside:
            where = f"epoch {int(piece['epoch']) + 1}, {_where(one, piece)}"
            console.print(Text(f"{where}: {plain(str(piece['why'])) or 'the reason is not known'}"))
        _print_rest(console, one.set_aside_total - len(one.set_aside))


def _print_rest(console: Console, rest: int) -> None:
    if rest > 0:
        console.print(f"and {rest:,} more", style="dim")


def _leases(one: DatasetView) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("lease", "node id", "round"):
        table.add_column(heading, justify="right")
    table.add_column("piece")
    table.add_column("consumed", justify="right")
    for lease in one.leases:
        table.add_row(
            str(lease.number),
            str(lease.node_id),
            str(lease.round),
            _where(one, lease.piece),
            f"{lease.consumed:,}",
        )
    return table


def _where(one: DatasetView, piece: "dict[str, int] | dict[str, int | str]") -> str:
    """The samples of a piece; files, partitions and listed shards are counted from 0."""
    extent = f"{EXTENTS[one.kind]} {piece['extent']}, " if one.kind in EXTENTS else ""
    return f"{extent}{piece['begin']:,} to {piece['end']:,}"


def _epoch(one: DatasetView) -> str:
    last = f" of {one.epochs}" if one.epochs > 0 else ""
    return f"{min(one.epoch + 1, one.epochs or one.epoch + 1)}{last}"


def _share(one: DatasetView) -> str:
    """The share that is done; empty if the size is unknown."""
    return f"{one.consumed / one.size:.1%}" if one.size > 0 else ""


def _rate(one: DatasetView) -> str:
    return f"{one.per_s:,.0f}/s" if one.per_s >= 10 else f"{one.per_s:.1f}/s"


def _left(one: DatasetView) -> str:
    if one.is_over:
        return "over"
    return duration(one.epoch_left_s) if one.epoch_left_s >= 0 else "-"
