# SPDX-License-Identifier: Apache-2.0
"""The job of `holdfast run --local-nodes`: its nodes are processes beside its master."""

import argparse
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from holdfast.model.errors import UsageError
from holdfast.model.ids import NodeId
from holdfast.platforms import Asked, Found
from holdfast.platforms.local.platform import LocalPlatform
from holdfast.ports.surroundings import Surroundings
from holdfast.runtime.observe import Say
from holdfast.runtime.settings import environment


@asynccontextmanager
async def open_job(
    arguments: argparse.Namespace, asked: Asked, say: Say
) -> AsyncIterator[Found | int]:
    """The nodes are what `--launch` describes, and end with the launcher."""
    if arguments.launch is None:
        raise UsageError("--platform local is for `holdfast run`, which says what to launch")
    command = [sys.executable, "-m", "holdfast.cli", "node", str(arguments.launch)]
    folder = asked.state / "nodes"

    def make_platform(known: Collection[NodeId]) -> LocalPlatform:
        return LocalPlatform(command, environment(), folder, lifeline=arguments.lifeline, say=say)

    surroundings = Surroundings(make_platform=make_platform)
    yield Found(state=asked.state, spec=asked.spec, surroundings=surroundings)
