# SPDX-License-Identifier: Apache-2.0
"""Times as Kubernetes writes them, in seconds since the epoch and back."""

from datetime import UTC, datetime


def stamp(seconds: float) -> str:
    """ "2026-11-16T10:30:00Z"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp(seconds: float) -> str:
    """ "2026-11-16T10:30:00.123456Z", as leases have it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_of(text: str) -> float | None:
    """The value of a time; None if the text is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
