# SPDX-License-Identifier: Apache-2.0
"""How long a job stands still after a kill: torchrun and Holdfast on one toy DDP script.

The clock runs from the SIGKILL to the first step finished by a process that was started after it.
The launchers take turns, so that noise of the machine meets all of them; a ratio compares the
medians of one invocation.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from common import (
    CONSOLE,
    Bar,
    Spread,
    describe_machine,
    finish,
    print_machine,
    print_table,
    standard_parser,
    wait_for,
)
from toy_job import HOLDFAST, TORCHRUN, TORCHRUN_DEFAULT, WARM_S, Job, Scenario

LAUNCHERS = (TORCHRUN, TORCHRUN_DEFAULT, HOLDFAST)

RECOVERY_LIMIT_S = {TORCHRUN: 120.0, TORCHRUN_DEFAULT: 30.0, HOLDFAST: 60.0}
RETURN_AFTER_S = 1.0
MASTER_AWAY_S = 2.0
MASTER_WATCH_S = 4.0
NOISY_RETRIES = 5

STAGES = ("detected", "rendezvous", "main", "imported", "group", "step", "full_world")
# Lines of a launcher's own output that mark the two stages the toy cannot see.
MARKS = {
    "detected": {
        TORCHRUN: re.compile(r"failed \(exitcode: "),
        HOLDFAST: re.compile(r"master: round \d+ is over"),
    },
    "rendezvous": {
        TORCHRUN: re.compile(r"Rendezvous complete for workers"),
        HOLDFAST: re.compile(r"master: round \d+: \d+ nodes?, "),
    },
}
# Measured earlier on one machine of this kind (baselines.md); printed for orientation, in no ratio.
QUOTED = {
    "a": "dlrover 4.03 s",
    "b": "dlrover 8.73 s",
    "c": "dlrover 64.0 s, torchft 5.77 s",
    "d": "dlrover 10.9 s, torchft 6.3 s",
    "e": "-",
    "f": "-",
    "g": "-",
}


SCENARIOS = (
    Scenario("a", "1 node x 2, worker killed", "1", 1, 2, "worker", least_ratio=12),
    Scenario("b", "2 nodes x 1, worker of node 1 killed", "2", 2, 1, "worker", least_ratio=18),
    Scenario("c", "1:2 nodes, node 1 killed", "1:2", 2, 1, "node", least_ratio=40),
    Scenario("d", "1:2 nodes, node 1 back after 1 s", "1:2", 2, 1, "node", True, least_ratio=10),
    Scenario("e", "2 nodes x 1, master killed, back after 2 s", "2", 2, 1, "master"),
    Scenario("f", "1 node x 2, killed 1 s after step 40", "1", 1, 2, "worker", is_early=True),
    Scenario("g", "2 nodes and a spare, node 1 killed", "2", 2, 1, "node", spares=1),
)
NOT_REPLACED = "c"
EARLY_RUNS = 7
EARLY_EXTRA_S = 0.3
"""What an early kill may cost more than under torchrun, in scenario f."""
SPARE_EXTRA_S = 0.15
"""What a node with a spare may cost more than one that is not replaced, in scenario g."""


@dataclass(slots=True)
class Run:
    """What one kill showed. Times are seconds since the kill."""

    stages: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    restarts: int | None = None
    slowest_step_ratio: float | None = None
    quiet_step_ratio: float | None = None


def kill_worker(job: Job) -> float:
    victim_node = str(job.scenario.node_count - 1)
    victims = [steps[-1] for steps in job.live_steps().values() if steps[-1].node == victim_node]
    victim = max(victims, key=lambda event: event.rank)
    at = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    return at


def kill_node(job: Job) -> float:
    """Holdfast's agent alone is killed, since its worker must not outlive it; torchrun's would."""
    # With a spare any two of three nodes may have come first.
    victim = max(int(steps[-1].node) for steps in job.live_steps().values())
    at = job.nodes[victim].kill()
    if job.launcher != HOLDFAST:
        for pid, steps in job.live_steps().items():
            if steps[-1].node == str(victim):
                os.kill(pid, signal.SIGKILL)
    return at


def stages_after(job: Job, killed_at: float) -> dict[str, float]:
    """Seconds from the kill to each stage of the recovery, for the process that stepped first."""
    later = [event for event in job.events() if event.t > killed_at]
    born = {event.pid for event in later if event.what == "main"}
    steps = [event for event in later if event.what == "step" and event.pid in born]
    if not steps:
        return {}
    first = min(steps, key=lambda event: event.t)
    stages = {e.what: e.t - killed_at for e in later if e.pid == first.pid and e.what != "step"}
    stages["step"] = first.t - killed_at
    full = [event.t for event in steps if event.world == job.scenario.world]
    if full:
        stages["full_world"] = min(full) - killed_at
    for stage, patterns in MARKS.items():
        pattern = patterns[HOLDFAST if job.launcher == HOLDFAST else TORCHRUN]
        marks = [t - killed_at for t, text in job.lines() if t > killed_at and pattern.search(text)]
        if stage == "rendezvous":
            # A failed attempt forms a world too; what counts is the last one before the main.
            marks = [t for t in marks if t < stages["main"]][-1:]
        if marks:
            stages[stage] = marks[0]
    return stages


def measure_recovery(job: Job) -> Run:
    if job.scenario.is_early:
        job.wait_early()
    else:
        job.wait_warm()
    killed_at = kill_node(job) if job.scenario.kills == "node" else kill_worker(job)
    if job.scenario.returns:
        time.sleep(max(0.0, killed_at + RETURN_AFTER_S - time.monotonic()))
        job.start_node(1)
    wanted = "full_world" if job.scenario.returns else "step"
    try:
        wait_for(
            f"recovery of {job.launcher}",
            lambda: wanted in stages_after(job, killed_at),
            RECOVERY_LIMIT_S[job.launcher],
        )
    except TimeoutError as error:
        return Run(stages=stages_after(job, killed_at), failure=str(error))
    return Run(stages=stages_after(job, killed_at))


def measure_master_kill(job: Job) -> Run:
    """Compares the steps around the master's death with as long a quiet time just before it."""
    watched_s = MASTER_AWAY_S + MASTER_WATCH_S
    job.wait_warm(WARM_S + watched_s)
    before = set(job.live_steps())
    assert job.master is not None
    killed_at = job.master.kill()
    time.sleep(MASTER_AWAY_S)
    job.restart_master()
    time.sleep(MASTER_WATCH_S)
    end = time.monotonic()
    restarts = sum(e.what == "main" and e.t > killed_at for e in job.events())
    start = killed_at - watched_s
    quiet = [step for pid in before for step in _durations(job, pid, start, killed_at)]
    after = [step for pid in job.live_steps() for step in _durations(job, pid, killed_at, end)]
    typical = statistics.median(quiet)
    return Run(
        restarts=restarts,
        slowest_step_ratio=max(after) / typical if after else None,
        quiet_step_ratio=max(quiet) / typical,
        failure="" if set(job.live_steps()) == before and after else "workers changed",
    )


def _durations(job: Job, pid: int, start: float, end: float) -> list[float]:
    times = [event.t for event in job.events() if event.pid == pid and event.what == "step"]
    pairs = itertools.pairwise(times)
    return [later - earlier for earlier, later in pairs if start < later <= end]


def run_once(launcher: str, scenario: Scenario) -> Run:
    measure: Callable[[Job], Run] = (
        measure_master_kill if scenario.kills == "master" else measure_recovery
    )
    job = Job(launcher, scenario)
    try:
        job.start()
        run = measure(job)
        if run.failure and launcher != TORCHRUN_DEFAULT:
            CONSOLE.print(job.tail())
        return run
    except (TimeoutError, RuntimeError) as error:
        CONSOLE.print(job.tail())
        return Run(failure=str(error))
    finally:
        job.close()


def run_scenario(scenario: Scenario, launchers: Sequence[str], count: int) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {launcher: [] for launcher in launchers}
    for number in range(count):
        for launcher in launchers:
            run = run_once(launcher, scenario)
            runs[launcher].append(run)
            CONSOLE.print(f"({scenario.key}) {launcher} run {number + 1}: {_one_line(run)}")
    return runs


def _one_line(run: Run) -> str:
    numbers = [f"{stage} {run.stages[stage]:.3f}" for stage in STAGES if stage in run.stages]
    if run.slowest_step_ratio is not None:
        numbers += [
            f"restarts {run.restarts}",
            f"slowest/median {run.slowest_step_ratio:.2f} (before: {run.quiet_step_ratio:.2f})",
        ]
    return ", ".join([*([f"FAILED: {run.failure}"] if run.failure else []), *numbers])


def launchers_for(scenario: Scenario, only: str | None) -> list[str]:
    """Who takes part: only Holdfast has a master and spares; torchrun cannot shrink in the
    default's 30 s."""
    able = {
        "worker": (TORCHRUN, HOLDFAST) if scenario.is_early else LAUNCHERS,
        "node": (HOLDFAST,) if scenario.spares else (TORCHRUN, HOLDFAST),
        "master": (HOLDFAST,),
    }[scenario.kills]
    return [launcher for launcher in able if only in (None, launcher)]


Results = dict[str, dict[str, list[Run]]]


def spread_of(runs: Sequence[Run], stage: str) -> Spread | None:
    return Spread.of(run.stages[stage] for run in runs if stage in run.stages and not run.failure)


def ratio_of(runs: dict[str, list[Run]], stage: str) -> float | None:
    peer = spread_of(runs.get(TORCHRUN, []), stage)
    ours = spread_of(runs.get(HOLDFAST, []), stage)
    all_recovered = not any(run.failure for run in runs.get(HOLDFAST, []))
    return peer.median / ours.median if peer and ours and all_recovered else None


def print_recoveries(results: Results) -> None:
    """The figures in one table, where the time went in another: two questions, two readers."""
    figures, stages = [], []
    for scenario in SCENARIOS:
        runs = results.get(scenario.key, {})
        for launcher, done in runs.items():
            if scenario.kills == "master":
                continue
            name = f"({scenario.key}) {launcher}"
            recovered = f"{sum(not run.failure for run in done)}/{len(done)}"
            cells = [name, recovered]
            for stage in ("step", "full_world"):
                cells.append(str(spread_of(done, stage) or "-"))
                ratio = ratio_of(runs, stage) if launcher == HOLDFAST else None
                cells.append(f"{ratio:.1f}x" if ratio is not None else "-")
            figures.append(cells)
            medians = [spread_of(done, stage) for stage in STAGES]
            stages.append([name, *(f"{m.median:.3f}" if m else "-" for m in medians)])
    if figures:
        columns = ["", "recovered", "first step", "ratio", "first step of the full world", "ratio"]
        print_table("seconds since the kill: median (min-max)", columns, figures)
        print_table("stages, medians in seconds since the kill", ["", *STAGES], stages)


def print_master_kills(runs: Sequence[Run]) -> None:
    rows = []
    for number, run in enumerate(runs, 1):
        ratios = [_number(ratio) for ratio in (run.slowest_step_ratio, run.quiet_step_ratio)]
        rows.append([str(number), str(run.restarts), *ratios])
    columns = ["(e) run", "worker restarts", "slowest/median step", "the same before the kill"]
    print_table("SIGKILL of Holdfast's master, started again after 2 s", columns, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def bars_of(results: Results) -> list[Bar]:
    bars = []
    for scenario in SCENARIOS:
        runs = results.get(scenario.key)
        if runs is None:
            continue
        if scenario.is_early or scenario.spares:
            bars.append(extra_of(scenario, results))
            continue
        if scenario.kills != "master":
            name = f"({scenario.key}) {scenario.title}: times faster than torchrun"
            bars.append(Bar(name, ratio_of(runs, "step"), scenario.least_ratio, at_least=True))
            continue
        done = runs.get(HOLDFAST, [])
        restarts = [run.restarts for run in done]
        slowest = [run.slowest_step_ratio for run in done]
        known = [value for value in restarts if value is not None]
        steps = [value for value in slowest if value is not None]
        complete = bool(done) and len(known) == len(steps) == len(done)
        most, worst = (max(known), max(steps)) if complete else (None, None)
        bars.append(Bar("(e) worker restarts after a master kill", most, 0, at_least=False))
        bars.append(Bar("(e) slowest step / median step", worst, 2, at_least=False))
    return bars


def extra_of(scenario: Scenario, results: Results) -> Bar:
    """How many seconds more than what it is compared with, both from this invocation."""
    ours = spread_of(results[scenario.key].get(HOLDFAST, []), "step")
    if scenario.is_early:
        other = spread_of(results[scenario.key].get(TORCHRUN, []), "step")
        than, limit = "torchrun", EARLY_EXTRA_S
    else:
        other = spread_of(results.get(NOT_REPLACED, {}).get(HOLDFAST, []), "step")
        than, limit = f"({NOT_REPLACED})", SPARE_EXTRA_S
    has_failed = any(run.failure for run in results[scenario.key].get(HOLDFAST, []))
    extra = ours.median - other.median if ours and other and not has_failed else None
    name = f"({scenario.key}) {scenario.title}: seconds more than {than}"
    return Bar(name, extra, limit, at_least=False)


def run_master_scenario(
    scenario: Scenario, launchers: Sequence[str], count: int
) -> dict[str, list[Run]]:
    """Repeats runs whose steps were uneven before the kill: they say nothing of the master."""
    kept: list[Run] = []
    for _ in range(NOISY_RETRIES):
        runs = run_scenario(scenario, launchers, count - len(kept))[HOLDFAST]
        quiet = [run for run in runs if (run.quiet_step_ratio or 0.0) <= 2]
        kept += quiet
        if len(kept) >= count:
            break
        noisy = len(runs) - len(quiet)
        CONSOLE.print(f"({scenario.key}) {noisy} runs were too noisy before the kill: again")
    return {HOLDFAST: kept}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = standard_parser("Time from a SIGKILL to the next finished step: torchrun, Holdfast.")
    parser.add_argument("--runs", type=int, help="per cell: 5 or more (default 5, --quick: 1)")
    parser.add_argument("--only", choices=LAUNCHERS, help="measure one launcher (gives no ratios)")
    keys = [scenario.key for scenario in SCENARIOS]
    parser.add_argument("--scenario", nargs="+", choices=keys, default=keys, help="default: all")
    args = parser.parse_args(argv)
    args.runs = args.runs or (1 if args.quick else 5)
    if args.runs < 5 and not args.quick:
        parser.error("a median needs --runs 5 or more (or say --quick)")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    machine = describe_machine()
    print_machine(machine)
    results: Results = {}
    for scenario in SCENARIOS:
        launchers = launchers_for(scenario, args.only)
        if args.quick and args.only is None:
            launchers = [launcher for launcher in launchers if launcher != TORCHRUN_DEFAULT]
        if scenario.key not in args.scenario or not launchers:
            continue
        measure = run_master_scenario if scenario.kills == "master" else run_scenario
        is_longer = scenario.is_early and not args.quick
        runs = max(args.runs, EARLY_RUNS) if is_longer else args.runs
        results[scenario.key] = measure(scenario, launchers, runs)
    print_recoveries(results)
    if "e" in results:
        print_master_kills(results["e"][HOLDFAST])
    for key in results:
        CONSOLE.print(f"({key}) not run here (baselines.md): {QUOTED[key]}")
    document: dict[str, Any] = {
        "machine": {**machine, "load_after": round(os.getloadavg()[0], 2)},
        "runs_per_cell": args.runs,
        "results": {
            key: {launcher: [asdict(run) for run in done] for launcher, done in runs.items()}
            for key, runs in results.items()
        },
    }
    print_machine(document["machine"])
    return finish(bars_of(results), document, args)


if __name__ == "__main__":
    sys.exit(main())
