# SPDX-License-Identifier: Apache-2.0
"""Walks one event through the core of the master and prints the files and functions it passes.

    .venv/bin/python scripts/trace_event.py [worker-death | pod-eviction ...] [--functions]

A walk is one step of the core: the event, and all facts that follow from it.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import holdfast.core  # noqa: E402
from holdfast.core.kernel import Core  # noqa: E402
from holdfast.model.node import ExitReason, Phase  # noqa: E402
from tests.core.harness import Job, running_fleet, running_pair  # noqa: E402

CORE = str(Path(holdfast.core.__file__).parent)

Walk = Callable[[Job], object]


def worker_death() -> tuple[Job, Walk]:
    """A worker of one of two nodes is killed in the middle of its steps."""
    job = running_pair()
    job.beat("a", at=5.0, round=1, steps=5, step=4, first=1.0, last=0.1)
    job.beat("b", at=5.0, round=1, steps=5, step=4, first=1.0, last=0.1)
    return job, lambda job: job.failed("b", 1, at=5.5, reason="killed", last=0.1)


def pod_eviction() -> tuple[Job, Walk]:
    """A platform says that the pod of one of four nodes was evicted."""
    job = running_fleet(4)
    return job, lambda job: job.seen(1, Phase.FAILED, ExitReason.KILLED)


WALKS = {"worker-death": worker_death, "pod-eviction": pod_eviction}


class Trace:
    """Counts calls of functions below `holdfast.core` while its kernel handles an event."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.switches = 0
        self._last = ""
        self._is_inside = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is Core.handle.__code__ and event in ("call", "return"):
            self._is_inside = event == "call"
        if event != "call" or not self._is_inside or not code.co_filename.startswith(CORE):
            return
        file = code.co_filename.removeprefix(CORE).lstrip("/")
        self.calls[file, code.co_qualname] += 1
        self.switches += file != self._last
        self._last = file

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.calls})


def trace(name: str) -> Trace:
    """Take a walk."""
    job, walk = WALKS[name]()
    found = Trace()
    sys.setprofile(found)
    try:
        walk(job)
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Walk events through the core.")
    parser.add_argument("walks", nargs="*", default=list(WALKS), metavar="WALK", help="which")
    parser.add_argument("--functions", action="store_true", help="list the functions, too")
    options = parser.parse_args()
    for name in options.walks:
        if name not in WALKS:
            parser.error(f"no walk {name!r}; there are {', '.join(WALKS)}")
        found = trace(name)
        print(
            f"{name}: {len(found.files)} files, {len(found.calls)} functions, "
            f"{found.switches} changes of file"
        )
        for file in found.files:
            inside = [function for where, function in found.calls if where == file]
            print(f"    {file}" + (f": {', '.join(sorted(inside))}" if options.functions else ""))


if __name__ == "__main__":
    main()
