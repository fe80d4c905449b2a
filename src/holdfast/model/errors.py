# SPDX-License-Identifier: Apache-2.0
"""Errors, ordered by what the code that catches them should do.

HoldfastError
├── UsageError         the user asked for something impossible: say the sentence, exit 2
├── RetryableError     no answer came: the same request may be sent again
├── RejectedError      the other side understood and said no: do not repeat
│   ├── FencedError    a newer incarnation or round has taken our place: stop working
│   └── AuthError      wrong or missing token
├── ProtocolError      the peer does not speak our protocol: close the connection
├── TimedOutError      the awaited thing did not happen in time
└── StateError         the state on disk cannot be used: stop before anything is lost
    ├── InUseError     another master has it
    └── AwayError      it is in order, for all we know, but out of reach: it may come back
        └── DiskFullError  nothing was written: try again when there is room
"""


class HoldfastError(Exception):
    """Base of every error that Holdfast raises on purpose."""


class UsageError(HoldfastError):
    """A mistake on the command line or in the settings, in one sentence for the user."""


class RetryableError(HoldfastError):
    """No answer came; the request may be sent again under the same idempotency key."""


class RejectedError(HoldfastError):
    """The request was understood and refused."""


class FencedError(RejectedError):
    """A newer incarnation or round has replaced the sender of the request."""


class AuthError(RejectedError):
    """The two sides do not hold the same job token."""


class ProtocolError(HoldfastError):
    """Bytes that are not our protocol, or a frame over the limit."""


class TimedOutError(HoldfastError):
    """A wait reached its limit."""


class StateError(HoldfastError):
    """The journal or state directory is unusable: corrupt, newer, full or read-only."""


class InUseError(StateError):
    """Another master has the state directory."""

    def __init__(self, sentence: str, *, pid: int, is_ending: bool) -> None:
        super().__init__(sentence)
        self.pid = pid
        self.is_ending = is_ending
        """Whether its launcher is gone: it is about to end by itself."""


class AwayError(StateError):
    """The file system refuses: no locks, EIO, no access, a stale mount. That may pass."""


class DiskFullError(AwayError):
    """There is no room left for the journal. Nothing was written and nothing else changed: the same
    write may be tried again."""
