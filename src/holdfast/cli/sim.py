# SPDX-License-Identifier: Apache-2.0
"""`holdfast sim`: the goodput that a cluster and its settings will give, before it is rented."""

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from holdfast.cli.words import count, duration
from holdfast.model.errors import UsageError
from holdfast.sim import failures, picture
from holdfast.sim.failures import DAY_S, Fault
from holdfast.sim.goodput import Cluster
from holdfast.sim.policies import OURS, STAGES, Policy, policies, with_stages
from holdfast.sim.prediction import CORE, RULES, Prediction, faults_of, lost_share, predict, uses
from holdfast.sim.traces import TRACE_SERVERS

REPLACE_S = 768.0
"""ByteRobust, table 7: the time to get a job's machines again at 16,384 GPUs."""

SPARES_SHARE = 0.006
"""Of 10,000 nodes 58 are lost in the worst of a hundred days, so about as many stand ready."""

SWEEP_DAYS_MAX = 7.0
"""The longest span for the curves of a picture; each is several simulations."""

_WORDS = {
    "checkpoint": "held up by saves",
    "detect": "until it was known",
    "idle": "waiting for machines",
    "lost": "work done again",
    "slow": "slow machines",
}
"""The words of the table for uses of time."""

MEASURED = (
    "Stage times: bench/RESULTS.md, measured on two CPU cores with 2.1 GB of state per node, and "
    "published figures where that has none (policies.toml); --stage sets others."
)


ANY_WIDTH = 10_000
"""A terminal width that fits every table."""


def add_parser(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str
) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "sim",
        help=summary,
        description="Simulate a job on a failing cluster and tell how much of the time is work. "
        "Failures follow published data, the master's real core decides, and one seed decides "
        "all chance: the same command gives the same figures.",
        epilog="Exit codes: 0 simulated, 2 usage. docs/simulation-goodput.md: what is modelled.",
        examples=(
            "holdfast sim --nodes 1000 --days 30",
            "holdfast sim --nodes 10000 --days 54 --failures rsc1 --compare",
        ),
        allow_abbrev=False,
    )
    known = ", ".join(failures.presets())
    add = parser.add_argument
    add("--nodes", type=int, default=1000, metavar="N", help="nodes of the job (%(default)s)")
    add("--days", type=float, default=7.0, metavar="D", help="how long it runs (%(default)g)")
    add("--failures", default="llama3", metavar="WHAT", help=f"{known}, or a trace file (.json)")
    add("--trace-servers", type=int, default=TRACE_SERVERS, metavar="N", help="in that trace")
    add("--spares", type=int, metavar="N", help="warm spare nodes (0.6 %% of the nodes)")
    add("--reserve", type=int, metavar="N", help="machines the platform has left (10 %%)")
    add("--replace-after", type=float, default=REPLACE_S, metavar="S", help="until one is there")
    add("--min-nodes", type=int, metavar="N", help="the smallest world (90 %% of the nodes)")
    add("--checkpoint-every", type=float, default=30.0, metavar="S", help="to memory (%(default)g)")
    add("--persist-every", type=float, default=600.0, metavar="S", help="to storage (%(default)g)")
    add("--restart", choices=sorted(policies()), default=OURS, help="the policy (%(default)s)")
    add("--compare", action="store_true", help="every policy, on the same faults")
    add(
        "--stage",
        action="append",
        default=[],
        metavar="NAME=S",
        help=f"how long a stage of the policy takes; names: {', '.join(STAGES)}",
    )
    add(
        "--engine",
        choices=(CORE, RULES),
        default=CORE,
        help="who decides for our policy: the real core, or a short form of its rules, which is "
        "faster and the same as far as tests can tell (%(default)s)",
    )
    add("--seed", type=int, default=1, metavar="K", help="decides all chance (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--picture", type=Path, metavar="FILE", help="a .png or .svg: over time, and by knob")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    cluster = _cluster(arguments)
    known = policies()
    asked = with_stages(known[arguments.restart], _stages(arguments.stage))
    chosen = {arguments.restart: asked}
    if arguments.compare:
        chosen |= {name: policy for name, policy in known.items() if name != arguments.restart}
    if arguments.picture is not None:
        picture.check(arguments.picture)
    faults = _faults(arguments, cluster)
    predictions: dict[str, Prediction] = {}
    took_s: dict[str, float] = {}
    console = Console(highlight=False)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for name, policy in chosen.items():
            task = bar.add_task(name, total=1.0)
            began_at = time.monotonic()
            predictions[name] = predict(
                cluster,
                policy,
                arguments.engine if name == OURS else RULES,
                faults,
                lambda share, task=task: bar.update(task, completed=share),  # type: ignore[misc]
            )
            took_s[name] = time.monotonic() - began_at
        if arguments.picture is not None:
            curves = _curves(arguments, cluster, asked, bar)
            title = f"{cluster.nodes:,} nodes, {arguments.failures}, seed {arguments.seed}"
            picture.draw(arguments.picture, title, predictions, curves)
    if arguments.json is not None:
        arguments.json.write_bytes(_json(arguments, cluster, predictions))
    _print(console, arguments, cluster, predictions, took_s)
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    nodes: int = arguments.nodes
    cluster = Cluster(
        nodes=nodes,
        min_nodes=_given(arguments.min_nodes, max(1, nodes * 9 // 10)),
        spares=_given(arguments.spares, max(1, round(nodes * SPARES_SHARE))),
        reserve=_given(arguments.reserve, max(1, nodes // 10)),
        replace_s=arguments.replace_after,
        rack_machines=failures.preset("llama3").rack_machines,
        checkpoint_every_s=arguments.checkpoint_every,
        persist_every_s=arguments.persist_every,
        span_s=arguments.days * DAY_S,
    )
    for name in ("nodes", "days", "checkpoint_every", "persist_every", "min_nodes"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value:g}: it must be more than 0")
    for name in ("spares", "reserve", "replace_after"):
        value = getattr(arguments, name)
        if value is not None and value < 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value:g}: it must be 0 or more")
    if cluster.min_nodes > nodes:
        raise UsageError(f"--min-nodes is {cluster.min_nodes}, but the job has {nodes} nodes")
    return cluster


def _given(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _stages(words: list[str]) -> dict[str, float]:
    stages = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            stages[name] = float(value)
        except ValueError as exc:
            raise UsageError(
                f"--stage {word}: it is NAME=SECONDS, for example hang_known_s=60"
            ) from exc
    return stages


def _curves(
    arguments: argparse.Namespace, cluster: Cluster, policy: Policy, bar: Progress
) -> dict[str, picture.Curve]:
    """Goodput against each knob, with the other settings as given; by the rules, at most a week."""
    cluster = replace(cluster, span_s=min(cluster.span_s, SWEEP_DAYS_MAX * DAY_S))
    faults = _faults(arguments, cluster)
    knobs = _knobs(cluster)
    task = bar.add_task("knobs", total=sum(map(len, knobs.values())))
    curves: dict[str, picture.Curve] = {}
    for knob, settings in knobs.items():
        curve = []
        for value, changed in settings:
            curve.append((value, predict(changed, policy, RULES, faults).goodput))
            bar.advance(task)
        curves[knob] = curve
    return curves


def _knobs(cluster: Cluster) -> dict[str, list[tuple[float, Cluster]]]:
    """Settings for each curve, from a quarter to four times the given value."""
    factors = (0.25, 0.5, 1.0, 2.0, 4.0)
    saves = [cluster.checkpoint_every_s * factor for factor in factors]
    persists = [cluster.persist_every_s * factor for factor in factors]
    replaces = [cluster.replace_s * factor for factor in factors]
    # More spares make a smaller reserve, so that the machines and their faults stay the same.
    both = cluster.spares + cluster.reserve
    spares = sorted({min(both, round(max(cluster.spares, 4) * factor)) for factor in (0, *factors)})
    return {
        "checkpoint every, s": [(x, replace(cluster, checkpoint_every_s=x)) for x in saves],
        "persist every, s": [(x, replace(cluster, persist_every_s=x)) for x in persists],
        "spares": [(x, replace(cluster, spares=x, reserve=both - x)) for x in spares],
        "replace after, s": [(x, replace(cluster, replace_s=x)) for x in replaces],
    }


def _faults(arguments: argparse.Namespace, cluster: Cluster) -> list[Fault]:
    return faults_of(
        arguments.failures,
        arguments.trace_servers,
        cluster.machines,
        cluster.span_s,
        arguments.seed,
    )


# ---- showing it ----------------------------------------------------------------------------------


def _json(
    arguments: argparse.Namespace, cluster: Cluster, predictions: Mapping[str, Prediction]
) -> bytes:
    """The given policy's figures at the top; the same seed gives the same bytes."""
    asked = predictions[arguments.restart]
    others = {name: one.figures for name, one in predictions.items() if one is not asked}
    whole = {
        **asked.figures,
        "policy": arguments.restart,
        "failures": Path(arguments.failures).name,
        "seed": arguments.seed,
        "cluster": cluster,
        "stages_from": MEASURED,
        "others": others,
    }
    return msgspec.json.format(msgspec.json.encode(whole)) + b"\n"


def _print(
    console: Console,
    arguments: argparse.Namespace,
    cluster: Cluster,
    predictions: Mapping[str, Prediction],
    took_s: Mapping[str, float],
) -> None:
    console.print(
        f"{count(cluster.nodes, 'node')}, {count(cluster.spares, 'spare')}, {cluster.reserve:,} in "
        f"reserve, {arguments.days:g} days, failures of {arguments.failures}, seed {arguments.seed}"
    )
    cells = {name: _cells(one, took_s[name]) for name, one in predictions.items()}
    print_cells(console, cells)
    known = policies()
    for name in predictions:
        console.print(f"{name}: {known[name].title}", style="dim")
    console.print(MEASURED, style="dim")


def print_cells(console: Console, columns: Mapping[str, Mapping[str, str]]) -> None:
    """The columns side by side; on a narrow terminal in several tables, so that none is cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", style="dim", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for heading in next(iter(columns.values())):
        table.add_row(heading, *(cells[heading] for cells in columns.values()))
    names = list(columns)
    wide = console.options.update(max_width=ANY_WIDTH)
    if len(names) == 1 or console.measure(table, options=wide).maximum <= console.width:
        console.print(table)
        return
    half = (len(names) + 1) // 2
    print_cells(console, {name: columns[name] for name in names[:half]})
    console.print()
    print_cells(console, {name: columns[name] for name in names[half:]})


def _cells(prediction: Prediction, took_s: float) -> dict[str, str]:
    figures = msgspec.convert(prediction.figures, _Figures)
    hour, recovery, checkpoints = figures.goodput_1h, figures.recovery_s, figures.checkpoints
    return {
        "goodput": f"{figures.goodput:.2%}",
        "  worst hour": f"{hour.get('min', 0):.1%}",
        "  1 % of hours below": f"{hour.get('p1', 0):.1%}",
        "  median hour": f"{hour.get('median', 0):.1%}",
        **{f"  {_WORDS.get(use, use)}": f"{lost_share(prediction, use):.2%}" for use in uses()},
        "interruptions": f"{figures.interruptions:,}",
        "  one every": f"{figures.hours_between_interruptions:.2f} h",
        "recovery, median": duration(recovery.get("p50", 0.0)),
        "  mean": duration(recovery.get("mean", 0.0)),
        "  p90": duration(recovery.get("p90", 0.0)),
        "  p99": duration(recovery.get("p99", 0.0)),
        "spares used": f"{figures.spares_used:,}",
        "smallest world": f"{figures.smallest_world:,}",
        "restores from storage": f"{figures.restores_from_storage:,}",
        "to storage": f"{checkpoints['storage_gb_per_s']:.1f} GB/s",
        "decided by": figures.engine,
        "events": f"{figures.events:,}",
        "  each second": f"{figures.events / max(took_s, 1e-9):,.0f}",
    }


class _Figures(msgspec.Struct):
    """The figures that the table shows."""

    goodput: float
    goodput_1h: dict[str, float]
    recovery_s: dict[str, float]
    checkpoints: dict[str, float]
    interruptions: int
    hours_between_interruptions: float
    spares_used: int
    smallest_world: int
    restores_from_storage: int
    engine: str
    events: int
