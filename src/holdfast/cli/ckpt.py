# SPDX-License-Identifier: Apache-2.0
"""`holdfast ckpt`: list, look into, verify, export and remove checkpoints on storage."""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from holdfast.checkpoint.foreign import dlrover_step
from holdfast.checkpoint.manifest import Committed, list_committed
from holdfast.checkpoint.retention import remove_steps
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import Storage, readable_size
from holdfast.checkpoint.verify import (
    Verdict,
    copy_checkpoint,
    directory_problems,
    quick_problems,
    verify_checkpoint,
)
from holdfast.model.errors import RejectedError, UsageError

FILES_SHOWN = 100
TORCH_FORMATS = ("safetensors", "torch", "dcp")
"""The formats that need the torch layer; see holdfast/torch/checkpoint/export.py."""

Command = Callable[[argparse.Namespace], int]


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command and its verbs."""
    parser = commands.add_parser(
        "ckpt",
        help=summary,
        description="Look after the checkpoints in a directory, or below a URL such as s3://...",
        epilog="Exit codes: 0 well, 1 damaged or not found, 2 usage.",
        examples=(
            "holdfast ckpt ls /shared/bert/saves",
            "holdfast ckpt verify /shared/bert/saves",
            "holdfast ckpt export s3://bucket/saves 1000 --to model.pt --format torch",
        ),
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    ls = _verb(verbs, "ls", _ls, "list the checkpoints, the newest first", "saves")
    ls.add_argument("--json", action="store_true", help="one line of JSON per checkpoint")
    show = _verb(verbs, "show", _show, "show what is in a checkpoint", "saves 1000")
    _add_step(show, "which step (default: the newest)")
    show.add_argument("--json", action="store_true", help="print the manifest as JSON")
    verify = _verb(
        verbs,
        "verify",
        _verify,
        "read every byte and compare it with the manifests",
        "s3://bucket/saves",
    )
    _add_step(verify, "only this step (default: all)")
    verify.add_argument("--json", action="store_true", help="one line of JSON per checkpoint")
    export = _verb(
        verbs,
        "export",
        _export,
        "copy a checkpoint, verified, maybe to another format",
        "saves 1000 --to model.safetensors --format safetensors",
    )
    _add_step(export, "which step (default: the newest)")
    export.add_argument("--to", type=Path, required=True, metavar="PATH", help="what to write")
    export.add_argument(
        "--format",
        choices=("copy", *TORCH_FORMATS),
        default="copy",
        help="copy: the directory as it is (default); safetensors, torch: one file; dcp: a "
        "directory for torch.distributed.checkpoint",
    )
    rm = _verb(verbs, "rm", _rm, "remove checkpoints", "saves 100 200")
    rm.add_argument("steps", nargs="+", type=_step, metavar="STEP", help="which steps")
    rm.add_argument("--yes", action="store_true", help="do not ask")
    rm.add_argument("--force", action="store_true", help="the newest may go too")


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Command,
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    text = f"{summary[0].upper()}{summary[1:]}."
    parser = verbs.add_parser(
        name,
        help=summary,
        description=text,
        examples=(f"holdfast ckpt {name} {example}",),
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR", help="the checkpoint directory, or a URL")
    parser.set_defaults(run=run)
    return parser


def _add_step(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("step", nargs="?", type=_step, metavar="STEP", help=text)


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a step is a number, not {text!r}")
    return int(text)


# ---- finding checkpoints -------------------------------------------------------------------------


def _open(directory: str) -> Storage:
    if "://" in directory:
        return open_storage(directory)
    path = Path(directory).absolute()
    if not path.is_dir():
        raise UsageError(f"{directory} is not a directory")
    return open_storage(str(path))


def _warn(problem: str) -> None:
    print(f"holdfast: {problem}", file=sys.stderr)


def _find(storage: Storage, step: int | None) -> Committed:
    committed = list_committed(storage, report=_warn)
    for one in committed:
        if step is None or one.manifest.step == step:
            return one
    which = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise RejectedError(f"there is no {which} in {storage.url}")


# ---- the verbs -----------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    storage = _open(arguments.directory)
    broken: list[str] = []
    committed = list_committed(storage, report=broken.append)
    problems = {one.name: quick_problems(storage, one) for one in committed}
    for sentence in broken:
        _warn(sentence)
    if arguments.json:
        for one in committed:
            print(msgspec.json.encode(_line(one, problems[one.name])).decode())
    elif committed:
        Console(highlight=False).print(_list_table(committed, problems))
    else:
        foreign = dlrover_step(storage)
        beside = "" if foreign is None else f", but DLRover's up to step {foreign}"
        print(f"no checkpoints in {storage.url}{beside}")
    return 1 if broken or any(problems.values()) else 0


def _line(one: Committed, problems: list[str]) -> dict[str, object]:
    manifest = one.manifest
    return {
        "step": manifest.step,
        "lineage": manifest.lineage,
        "name": one.name,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "shared": manifest.shared,
        "files": len(manifest.files),
        "size": manifest.size,
        "problems": problems,
    }


def _list_table(committed: list[Committed], problems: dict[str, list[str]]) -> Table:
    table = _table(("step", "ranks", "size"), ("created", "name", "state"))
    for one in committed:
        found = problems[one.name]
        table.add_row(
            str(one.manifest.step),
            str(one.manifest.world_size),
            readable_size(one.manifest.size),
            one.manifest.created[:19].replace("T", " "),
            Text(one.name),
            Text(f"damaged: {found[0]}", style="bold red") if found else Text("complete"),
        )
    return table


def _show(arguments: argparse.Namespace) -> int:
    storage = _open(arguments.directory)
    one = _find(storage, arguments.step)
    problems = quick_problems(storage, one)
    if arguments.json:
        print(msgspec.json.encode(one.manifest).decode())
    else:
        _print_checkpoint(storage, one)
    for problem in problems:
        _warn(problem)
    return 1 if problems else 0


def _print_checkpoint(storage: Storage, one: Committed) -> None:
    console = Console(highlight=False)
    manifest = one.manifest
    kind = "the same model on every rank" if manifest.shared else "every rank its own part"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("checkpoint", Text(storage.full(one.name)))
    grid.add_row("step", f"{manifest.step} of lineage {manifest.lineage}")
    grid.add_row("created", manifest.created)
    grid.add_row("saved by", f"{manifest.world_size} ranks, {kind}")
    grid.add_row("size", f"{readable_size(manifest.size)} in {len(manifest.files)} files")
    console.print(grid)
    console.print()
    table = _table(("size", "digest"), ("part", "file"))
    for file in manifest.files[:FILES_SHOWN]:
        table.add_row(readable_size(file.size), file.digest, Text(file.part), Text(file.name))
    console.print(table)
    if len(manifest.files) > FILES_SHOWN:
        rest = len(manifest.files) - FILES_SHOWN
        console.print(f"and {rest} more files: see --json", style="dim")


def _verify(arguments: argparse.Namespace) -> int:
    storage = _open(arguments.directory)
    beside = directory_problems(storage) if arguments.step is None else []
    committed = list_committed(storage)
    if arguments.step is not None:
        committed = [_find(storage, arguments.step)]
    elif not committed and not beside:
        raise RejectedError(f"there is no checkpoint in {storage.url}")
    for problem in beside:
        _warn(problem)
    is_whole = not beside
    with _progress(sum(one.manifest.size for one in committed), "verifying") as progress:
        for one in committed:
            verdict = verify_checkpoint(storage, one, progress)
            is_whole = is_whole and verdict.is_whole
            _print_verdict(verdict, one, as_json=arguments.json)
    return 0 if is_whole else 1


def _print_verdict(verdict: Verdict, one: Committed, *, as_json: bool) -> None:
    if as_json:
        line = {"step": verdict.step, "name": verdict.name, "problems": list(verdict.problems)}
        print(msgspec.json.encode(line).decode(), flush=True)
        return
    if verdict.is_whole:
        size = readable_size(one.manifest.size)
        print(f"step {verdict.step}: {len(one.manifest.files)} files, {size}, all well", flush=True)
    for problem in verdict.problems:
        print(f"step {verdict.step}: {problem}", flush=True)


def _export(arguments: argparse.Namespace) -> int:
    storage = _open(arguments.directory)
    one = _find(storage, arguments.step)
    target = arguments.to.absolute()
    if target.exists():
        raise UsageError(f"{arguments.to} exists already")
    with _progress(one.manifest.size, "copying") as progress:
        if arguments.format == "copy":
            copy_checkpoint(storage, one, target, progress)
        else:
            _export_by_torch(storage, one, target, arguments.format)
    print(f"step {one.manifest.step} is in {arguments.to}")
    return 0


def _export_by_torch(storage: Storage, one: Committed, target: Path, file_format: str) -> None:
    # Imported here: everything else in this file works without torch.
    try:
        torch_side = importlib.import_module("holdfast.torch.checkpoint.export")
    except ImportError as exc:
        raise UsageError(f"--format {file_format} needs torch: {exc}") from exc
    torch_side.export_checkpoint(storage, one, target, file_format)


def _rm(arguments: argparse.Namespace) -> int:
    storage = _open(arguments.directory)
    committed = list_committed(storage, report=_warn)
    chosen = [one for one in committed if one.manifest.step in arguments.steps]
    missing = set(arguments.steps) - {one.manifest.step for one in chosen}
    if missing:
        raise RejectedError(f"there is no checkpoint of step {min(missing)} in {storage.url}")
    if committed[0] in chosen and not arguments.force:
        raise UsageError(f"step {committed[0].manifest.step} is the newest: give --force if it may")
    if not arguments.yes and not _confirmed(chosen):
        print("nothing was removed")
        return 1
    for one in chosen:
        series = one.series(storage.url)
        if not remove_steps(storage, series, {one.manifest.step}, newest_too=arguments.force):
            raise RejectedError(
                f"{storage.full(one.name)} is left: it is not called as its manifest says, so only "
                "you can know what it is"
            )
        print(f"step {one.manifest.step} is removed")
    return 0


def _confirmed(chosen: list[Committed]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask on: give --yes")
    steps = ", ".join(str(one.manifest.step) for one in chosen)
    size = readable_size(sum(one.manifest.size for one in chosen))
    return input(f"Remove step {steps} ({size})? [y/N] ").strip().lower() in {"y", "yes"}


# ---- showing -------------------------------------------------------------------------------------


def _table(numbers: tuple[str, ...], words: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in words:
        table.add_column(heading, overflow="fold")
    return table


@contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda size: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda size: bar.advance(task, size)
