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
    address: str
    """Where other nodes reach this one; empty if not set."""
    leave_s: float
    """How long the platform gives this node to leave before it kills it; 0 if not set."""


def node_settings(environ: Mapping[str, str] | None = None) -> NodeSettings:
    """What the platform that started this agent told it; -1 for numbers that are not set."""
    env = os.environ if environ is None else environ
    return NodeSettings(
        node_id=int(env.get("HOLDFAST_NODE_ID", "-1")),
        lifeline=int(env.get("HOLDFAST_LIFELINE", "-1")),
        topology=env.get("HOLDFAST_TOPOLOGY", ""),
        # POD_IP is a name that others use too: it counts where a platform of ours set it.
        address=env.get("POD_IP", "") if "HOLDFAST_NODE_ID" in env else "",
        leave_s=float(env.get("HOLDFAST_GRACE_S", "0")),
    )


def environment() -> dict[str, str]:
    """A copy of the whole environment: the start of what a child gets."""
    return dict(os.environ)


def worker_base() -> dict[str, str]:
    """What workers inherit: everything but what a platform told their agent alone."""
    own = ("HOLDFAST_NODE_ID", "HOLDFAST_LIFELINE", "HOLDFAST_GRACE_S")
    return {name: value for name, value in os.environ.items() if name not in own}


def runtime_root() -> Path:
    """Where the jobs of this user leave a note of themselves, for `holdfast status`."""
    base = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(base) / f"holdfast-{os.getuid()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where this training process stands among the others, as its launcher told it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_world_size: int
    """How many nodes there are."""
    round: int
    """Which start of the workers this is, counted from 1."""
    meeting_point: str
    """What the processes of one job have in common and other jobs have not; empty if alone."""
    launcher: int
    """The process that starts this one again when it dies; -1 if there is none."""


def worker_place(environ: Mapping[str, str] | None = None) -> WorkerPlace:
    """The place of this process; that of a single process if no launcher said anything."""
    env = os.environ if environ is None else environ
    restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    world_size, rank = int(env.get("WORLD_SIZE", "1")), env.get("RANK", "0")
    return WorkerPlace(
        rank=int(rank),
        local_rank=int(env.get("HOLDFAST_LOCAL_RANK", env.get("LOCAL_RANK", rank))),
        world_size=world_size,
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", env.get("WORLD_SIZE", "1"))),
        group_world_size=int(env.get("GROUP_WORLD_SIZE", "1")),
        round=int(env.get("HOLDFAST_ROUND", str(restarts + 1))),
        meeting_point=_meeting_point(env, world_size),
        launcher=os.getppid() if "TORCHELASTIC_RUN_ID" in env else -1,
    )


def _meeting_point(env: Mapping[str, str], world_size: int) -> str:
    if "TORCHELASTIC_RUN_ID" in env:
        # The port of its store may change when torchrun restarts the workers; its process does not.
        return f"{env['TORCHELASTIC_RUN_ID']}|{os.getppid()}"
    if world_size > 1:
        return f"{env.get('MASTER_ADDR', '')}|{env.get('MASTER_PORT', '')}"
    return ""


def memory_dir() -> Path:
    """Where the memory checkpoints are: a file system in memory, normally /dev/shm."""
    return Path(os.environ.get("HOLDFAST_MEMORY_DIR") or "/dev/shm")


def disk_dir() -> Path:
    """Where a checkpoint for storage waits that finds no room in memory: the temporary folder."""
    return Path(os.environ.get("TMPDIR") or "/tmp")
