# SPDX-License-Identifier: Apache-2.0
"""Policies: what a job does about a failure, and how long that takes. The numbers and their sources
are in policies.toml."""

import tomllib
from collections.abc import Mapping
from importlib.resources import files

import msgspec

from holdfast.model.errors import UsageError

OURS = "ours"


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a job recovers. Times in seconds; a state of `state_gb` per node."""

    title: str
    memory: bool
    """Whether state is saved to memory that survives the worker."""
    peers: bool
    """Whether such saves are copied to other nodes."""
    elastic: bool
    """Whether the job goes on with fewer nodes while there is no node to step in."""

    exit_known_s: float
    """Until the end of a process is known."""
    lost_known_s: float
    """Until the loss of a node whose connections were closed is known."""
    grace_s: float
    """How long such a node may take to come back before the job acts."""
    silent_known_s: float
    """Until the loss of a node that vanished silently is known."""
    hang_known_s: float
    corrupt_known_s: float

    rendezvous_s: float
    """From the decision until every node has heard of it."""
    restart_s: float
    """From there to the first step, without the restore."""
    memory_restore_s: float
    peer_restore_s: float
    storage_restore_s: float

    save_s: float
    """How long a save to memory holds up the training."""
    copy_s: float
    """Until its copies are with the peers."""
    persist_block_s: float
    """How long a save to storage holds up the training."""
    persist_s: float
    """Until it is on storage."""
    state_gb: float


STAGES = tuple(name for name in Policy.__struct_fields__ if name.endswith(("_s", "_gb")))
"""The fields that `--stage` can set."""


def policies() -> dict[str, Policy]:
    """Every policy that can be simulated, by name."""
    text = files("holdfast.sim").joinpath("policies.toml").read_text("utf-8")
    return {name: msgspec.convert(table, Policy) for name, table in tomllib.loads(text).items()}


def with_stages(policy: Policy, stages: Mapping[str, float]) -> Policy:
    """The policy with other stage times."""
    for name, value in stages.items():
        if name not in STAGES:
            raise UsageError(f"there is no stage {name!r}; known are {', '.join(STAGES)}")
        if value < 0:
            raise UsageError(f"the stage {name} is {value:g}: it must be 0 or more")
    return msgspec.structs.replace(policy, **stages)
