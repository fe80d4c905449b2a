# SPDX-License-Identifier: Apache-2.0
"""Variables of torchrun and the prior art that are set although no part of Holdfast reads them.

A user who sets one expects an effect. One line at the start names them all, and
docs/from-dlrover.md says for each what to use instead.
"""

from collections.abc import Iterable, Mapping

PAGE = "docs/from-dlrover.md#variables"

PREFIXES = ("DLROVER_", "XPU_TIMER_", "PET_")
"""Every variable with such a prefix, except those that a flag reads."""

NAMES = frozenset(
    {
        "FAILURE_NODE_ERRORS",
        "HCCL_IF_BASE_PORT",
        "HOST_PORTS",
        "MASTER_CLIENT_TIMEOUT",
        "MCCL_SETTINGS",
        "MOCK_ERR_RANK",
        "NCCL_SETTINGS",
        "NETWORK_CHECK_TIMEOUT",
        "RUNTIME_METRICS_PATH",
        "TRAINING_LOG_FILE",
    }
)


def unread(environ: Mapping[str, str], read: Iterable[str]) -> list[str]:
    """The variables that are set and never read; `read` are the names that flags read."""
    known = set(read)
    found = [
        name
        for name, value in environ.items()
        if value and name not in known and (name in NAMES or name.startswith(PREFIXES))
    ]
    # Holdfast's platforms set it to true, as the prior art does; switching it off has no effect.
    if environ.get("MONITOR_ENABLED", "").lower() in ("false", "0"):
        found.append("MONITOR_ENABLED")
    return sorted(found)


def unread_note(environ: Mapping[str, str], read: Iterable[str]) -> list[str]:
    """The line for the start of a command; none if there is nothing to report."""
    names = unread(environ, read)
    if not names:
        return []
    return [f"set in the environment, but not read by Holdfast: {', '.join(names)} ({PAGE})"]
