# SPDX-License-Identifier: Apache-2.0
"""Where nodes come from. Platforms do not know each other.

`holdfast master --platform NAME` looks its platform up in NAMES. The package of a platform has

- `options.py`: `add_options(parser)` declares its options. It is imported for every `--help`, so it
  imports nothing of the platform;
- `kind.py`: `open_job(arguments, asked, say)` finds the job and what its master works with
  (`OpenJob`). It is imported when the platform is used.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from holdfast.model.job import JobSpec
from holdfast.ports.surroundings import Surroundings
from holdfast.runtime.observe import Say

NAMES = {
    "local": "agents are processes of this machine; `holdfast run` uses it",
    "kubernetes": "the job is the ElasticJob of that name, and its nodes are pods",
}
"""Each is a package beside this file; with what --help says of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line says of a job."""

    job: str
    state: Path
    spec: JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The job as its platform has it, and what its master works with."""

    state: Path
    """Where its journal is."""
    spec: JobSpec
    surroundings: Surroundings
    hands_over: bool = False
    """Whether SIGTERM ends this master and not its job: the platform starts another."""


OpenJob = Callable[[argparse.Namespace, Asked, Say], AbstractAsyncContextManager[Found | int]]
"""Finds the job; or the exit code, if it has ended already. What was opened is closed at the end of
the master."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of all platforms."""
    for name in NAMES:
        import_module(f"{__name__}.{name}.options").add_options(parser)


def opener(name: str) -> OpenJob:
    """How this platform finds its job."""
    open_job: OpenJob = import_module(f"{__name__}.{name}.kind").open_job
    return open_job
