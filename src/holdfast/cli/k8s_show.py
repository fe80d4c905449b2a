# SPDX-License-Identifier: Apache-2.0
"""Jobs in a cluster as tables: the output of `holdfast k8s status`."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.words import duration, plain
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.pods import Pod, seen
from holdfast.platforms.kubernetes.times import seconds_of
from holdfast.runtime.observe import wall_clock

NODES_SHOWN = 40
EVENTS_SHOWN = 10
FILE_WIDTH = 240
WIDE = 100
_PHASE_STYLES = {"Running": "bold green", "Succeeded": "bold green", "Failed": "bold red"}

Obj = Mapping[str, Any]


def print_jobs(jobs: Sequence[Obj], namespace: str, *, as_json: bool) -> None:
    """All jobs of a namespace, one line each."""
    if as_json:
        print(msgspec.json.encode(jobs).decode())
        return
    console = _console()
    if not jobs:
        console.print(f"there are no jobs in the namespace {namespace}")
        return
    table = _table("name", "phase", "workers", "active", "step", "age", "message")
    for job in jobs:
        status = job.get("status") or {}
        worker = job["spec"].get("replicaSpecs", {}).get("worker", {})
        table.add_row(
            Text(plain(job["metadata"]["name"])),
            _phase(status),
            Text(_number(worker.get("replicas"))),
            Text(_number(status.get("replicas"))),
            Text(_number(status.get("step"))),
            _age(job["metadata"].get("creationTimestamp")),
            Text(plain(message_of(status))),
        )
    console.print(table)


def print_job(job: Obj, pods: Sequence[Pod], events: Sequence[Obj], *, as_json: bool) -> None:
    """One job: its state, its conditions, its pods and the last events."""
    if as_json:
        print(msgspec.json.encode(job).decode())
        return
    console = _console()
    console.print(_summary(job))
    conditions = (job.get("status") or {}).get("conditions") or []
    is_wide = console.width >= WIDE
    for table in (_conditions(conditions), _pods(pods, is_wide=is_wide), _events(events)):
        if table.row_count:
            console.print()
            console.print(table)
    if len(pods) > NODES_SHOWN:
        console.print(f"and {len(pods) - NODES_SHOWN} more pods", style="dim")


def line_of(name: str, status: Obj) -> str:
    """The state of a job, in one line."""
    text = message_of(status)
    return plain(f"elasticjob/{name} {_phase(status)}" + (f": {text}" if text else ""))


def message_of(status: Obj) -> str:
    """The most important message now."""
    malformed = _condition(status, "Malformed")
    if malformed.get("status") == "True":
        return str(malformed.get("message") or "")
    return str(status.get("message") or "")


def is_malformed(status: Obj) -> bool:
    """Whether the job cannot start because of its manifest."""
    return _condition(status, "Malformed").get("status") == "True"


def _console() -> Console:
    console = Console(highlight=False)
    # Long names must not be cut where a program searches for them.
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)


def _condition(status: Obj, kind: str) -> Obj:
    conditions = status.get("conditions") or []
    return next((found for found in conditions if found.get("type") == kind), {})


def _summary(job: Obj) -> Table:
    status, metadata = job.get("status") or {}, job["metadata"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    name = Text(plain(f"{metadata['namespace']}/{metadata['name']}  "), style="bold")
    grid.add_row("job", name + _phase(status))
    if message_of(status):
        grid.add_row("", Text(plain(message_of(status))))
    for role, counts in (status.get("replicaStatuses") or {}).items():
        told = [f"{counts[word]} {word}" for word in _COUNTS if counts.get(word)]
        grid.add_row(plain(role), Text(plain(", ".join(told)) or "none"))
    for label, field in (("step", "step"), ("goodput", "goodput"), ("restarts", "restarts")):
        if status.get(field) is not None:
            grid.add_row(label, Text(_number(status[field])))
    grid.add_row("age", _age(metadata.get("creationTimestamp")))
    return grid


_SHORT = frozenset({"rank", "active", "ago", "times", "since", "age", "step"})
_COUNTS = ("active", "pending", "initial", "succeeded", "failed")


def _conditions(conditions: Sequence[Obj]) -> Table:
    table = _table("condition", "status", "reason", "since", "message")
    for found in conditions:
        words = [plain(str(found.get(name) or "")) for name in ("type", "status", "reason")]
        since = _age(found.get("lastTransitionTime"))
        table.add_row(*map(Text, words), since, Text(plain(str(found.get("message") or ""))))
    return table


def _pods(pods: Sequence[Pod], *, is_wide: bool) -> Table:
    """A table of pods; on a narrow terminal all long values share one column."""
    last = ("relaunches", "host", "message") if is_wide else ("about",)
    table = _table("role", "rank", "pod", "phase", *last)
    ordered = sorted(pods, key=lambda pod: (pod.slot[0], pod.slot[1].zfill(9), pod.metadata.name))
    for pod in ordered[:NODES_SHOWN]:
        phase, reason, message = seen(pod)
        words = f"{phase} ({reason})" if reason else str(phase)
        role, rank = pod.slot
        relaunches = pod.metadata.labels.get(names.RELAUNCHES_LABEL, "")
        cells = [role, rank, pod.metadata.name, words]
        if is_wide:
            cells += [relaunches, pod.spec.node_name, message]
        else:
            again = f"relaunched {relaunches} times" if relaunches not in ("", "0") else ""
            cells.append(", ".join(filter(None, (pod.spec.node_name, again, message))))
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table


def _events(events: Sequence[Obj]) -> Table:
    table = _table("last events", "ago", "times", "message")
    ordered = sorted(events, key=lambda event: str(event.get("lastTimestamp") or ""))
    for event in ordered[-EVENTS_SHOWN:]:
        table.add_row(
            Text(
                plain(str(event.get("reason") or "")),
                style="yellow" if event.get("type") == "Warning" else "",
            ),
            _age(event.get("lastTimestamp")),
            Text(str(event.get("count") or 1)),
            Text(plain(str(event.get("message") or ""))),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        # A long value takes further lines where the terminal is narrow; nothing is ever cut.
        table.add_column(heading, no_wrap=heading in _SHORT, overflow="fold")
    return table


def _phase(status: Obj) -> Text:
    phase = plain(str(status.get("phase") or ("Malformed" if is_malformed(status) else "Created")))
    return Text(phase, style=_PHASE_STYLES.get(phase, ""))


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else plain(str(value or ""))


def _age(stamp: object) -> Text:
    at = seconds_of(stamp) if isinstance(stamp, str) else None
    return Text("" if at is None else duration(max(wall_clock() - at, 0.0)))
