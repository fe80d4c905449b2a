# SPDX-License-Identifier: Apache-2.0
"""The environment, read in one place and handed on as frozen values."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What an agent tells the workers it starts."""

    socket: str
    """Address of the agent's private socket: "unix:PATH"."""
    token_file: str
    round: int
    progress: str
    """Path of the worker's progress cell; empty if it has none."""


def worker_settings(environ: Mapping[str, str] | None = None) -> WorkerSettings | None:
    """The settings of this worker; None when it was not started by Holdfast."""
    env = os.environ if environ is None else environ
    if "HOLDFAST_SOCKET" not in env:
        return None
    return WorkerSettings(
        socket=env["HOLDFAST_SOCKET"],
        token_file=env.get("HOLDFAST_TOKEN_FILE", ""),
        round=int(env.get("HOLDFAST_ROUND", "0")),
        progress=env.get("HOLDFAST_PROGRESS", ""),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a platform tells the agents it starts."""

    node_id: int
    lifeline: int
    """A descriptor that reaches end-of-file when the launcher dies; -1 if there is none."""
    topology: str
    """Where the node stands, e.g. its switch: nodes of equal topology get neighbouring ranks."""


def node_settings(environ: Mapping[str, str] | None = None) -> NodeSettings:
    """Who this agent is to the platform that started it; -1 where nobody said."""
    env = os.environ if environ is None else environ
    return NodeSettings(
        node_id=int(env.get("HOLDFAST_NODE_ID", "-1")),
        lifeline=int(env.get("HOLDFAST_LIFELINE", "-1")),
        topology=env.get("HOLDFAST_TOPOLOGY", ""),
    )


def environment() -> dict[str, str]:
    """A copy of the whole environment: the start of what a child gets."""
    return dict(os.environ)


def worker_base() -> dict[str, str]:
    """What workers inherit: everything but what a platform told their agent alone."""
    own = ("HOLDFAST_NODE_ID", "HOLDFAST_LIFELINE")
    return {name: value for name, value in os.environ.items() if name not in own}


def runtime_root() -> Path:
    """Where the jobs of this user leave a note of themselves, for `holdfast status`."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(base) / f"holdfast-{os.getuid()}"
