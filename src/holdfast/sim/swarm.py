# SPDX-License-Identifier: Apache-2.0
"""Play many seeds, one after the other; make a seed that fails as small as possible.

    python -m holdfast.sim.swarm --seeds 0..1000 --out found

A scenario that fails is written to the folder `--out` as a file that tests/sim plays again, once it
is moved to tests/sim/found. With `--digests` the program prints a hash over each run instead;
scripts/same-behaviour compares two commits by these. driver_swarm.py does the same with the real
drivers.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from holdfast.sim.run import run
from holdfast.sim.scenario import Scenario, from_seed

TRIES_MAX = 300
"""How many runs the program spends on making one scenario smaller."""

Finds = Callable[[Scenario], str]
"""What is wrong with a scenario; empty if nothing is."""


def problem_of(scenario: Scenario) -> str:
    """The violation of an invariant in this scenario; an internal error counts as one."""
    return or_error(lambda: run(scenario).problem)


def or_error(play: Callable[[], str]) -> str:
    """The result of a run; the error if it ends with one."""
    try:
        return play()
    except (
        AssertionError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as exc:
        return f"{type(exc).__name__}: {exc}"


def shrink(scenario: Scenario, finds: Finds = problem_of) -> Scenario:
    """A smaller scenario that fails too: fewer faults, then a smaller job, then shorter faults."""
    tries = 0
    is_smaller = True
    while is_smaller and tries < TRIES_MAX:
        is_smaller = False
        for candidate in _smaller(scenario):
            tries += 1
            if finds(candidate):
                scenario, is_smaller = candidate, True
                break
            if tries >= TRIES_MAX:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """All scenarios that are one step smaller, the largest steps first."""
    faults = scenario.faults
    if len(faults) > 3:
        half = len(faults) // 2
        yield replace(scenario, faults=faults[:half])
        yield replace(scenario, faults=faults[half:])
    for number in range(len(faults)):
        yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    for number, ask in enumerate(scenario.asks):
        if ask.suspend is not False:  # A job without its resume does not come to its end.
            fewer = scenario.asks[:number] + scenario.asks[number + 1 :]
            yield replace(scenario, asks=fewer)
    for name, least in (("samples", 0), ("spares", 0), ("steps", 10), ("nproc", 1)):
        value = getattr(scenario, name)
        if value > least:
            yield replace(scenario, **{name: max(least, value // 2)})
    if scenario.nodes > max(2, scenario.min_nodes) and scenario.node_unit == 1:
        yield replace(scenario, nodes=scenario.nodes - 1)
    for number, fault in enumerate(faults):
        if fault.seconds > 1.0:
            shorter = replace(fault, seconds=round(fault.seconds / 2, 3))
            yield replace(scenario, faults=(*faults[:number], shorter, *faults[number + 1 :]))


def save(scenario: Scenario, folder: Path) -> Path:
    """Write a scenario to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{scenario.seed}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")
    return path


def load(path: Path) -> Scenario:
    """Read a scenario from its file."""
    return msgspec.json.decode(path.read_bytes(), type=Scenario)


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    try:
        return range(int(first), int(last) if dots else int(first) + 1)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 0..1000") from exc


def _first(seeds: range, scenario_of: Callable[[int], Scenario], finds: Finds) -> int:
    """Play until a seed fails, and return how many seeds that took."""
    for count, seed in enumerate(seeds, start=1):
        if problem := finds(scenario_of(seed)):
            sys.stdout.write(f"seed {seed} after {count} seeds: {problem}\n")
            return 1
    sys.stdout.write(f"{len(seeds)} seeds, none failed\n")
    return 0


def main(
    argv: Sequence[str] | None = None,
    scenario_of: Callable[[int], Scenario] = from_seed,
    finds: Finds = problem_of,
    digest_of: Callable[[Scenario], str] = lambda scenario: run(scenario).digest,
) -> int:
    parser = argparse.ArgumentParser(description="Play many seeds; make those that fail small.")
    parser.add_argument("--seeds", type=_seeds, default=range(1000), help="A..B, without B")
    parser.add_argument("--out", type=Path, default=Path("found"), help="where failures go")
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    parser.add_argument("--digests", action="store_true", help="print a hash over each run")
    options = parser.parse_args(argv)
    if options.digests:
        for seed in options.seeds:
            sys.stdout.write(f"{seed} {digest_of(scenario_of(seed))}\n")
        return 0
    if options.first:
        return _first(options.seeds, scenario_of, finds)
    began = time.monotonic()
    failed = 0
    for done, seed in enumerate(options.seeds, start=1):
        scenario = scenario_of(seed)
        if problem := finds(scenario):
            failed += 1
            path = save(shrink(scenario, finds), options.out)
            sys.stdout.write(f"seed {seed}: {problem}; the smallest that fails is in {path}\n")
        if done % 500 == 0:
            took_s = time.monotonic() - began
            sys.stdout.write(f"{done} seeds, {failed} failed, {done / took_s:.0f} seeds/s\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(options.seeds)} seeds, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
