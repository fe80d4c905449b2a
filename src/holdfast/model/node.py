# SPDX-License-Identifier: Apache-2.0
"""Nodes: their phases, why they end, and what the platform says about them."""

import enum
import re


class Phase(enum.StrEnum):
    """The life of one node id. It only ever moves forward: a late report revives no node."""

    INITIAL = "initial"
    """Ordered, not yet seen."""
    PENDING = "pending"
    """The platform has it, but it does not run."""
    RUNNING = "running"
    """Its agent attached, or the platform saw it run."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GONE = "gone"
    """Deleted, or vanished from a full listing."""

    @property
    def is_final(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.GONE)

    def after(self, seen: "Phase") -> "Phase":
        """The phase once `seen` is observed."""
        return seen if seen in _NEXT[self] else self


_NEXT: dict[Phase, frozenset[Phase]] = {
    Phase.INITIAL: frozenset(
        {Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED, Phase.GONE}
    ),
    Phase.PENDING: frozenset({Phase.RUNNING, Phase.SUCCEEDED, Phase.FAILED, Phase.GONE}),
    Phase.RUNNING: frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.GONE}),
    Phase.SUCCEEDED: frozenset({Phase.GONE}),
    Phase.FAILED: frozenset({Phase.GONE}),
    Phase.GONE: frozenset(),
}


class ExitReason(enum.StrEnum):
    """Why a worker or a node ended: the failure class, each with its own budget."""

    ERROR = "error"
    """The program itself: an exception, exit code 1, an assertion, a segmentation fault."""
    OOM = "oom"
    KILLED = "killed"
    """It was ended from outside: preemption, eviction, an operator, a kill."""
    HARDWARE = "hardware"
    LOST = "lost"
    """The node stopped answering, and the reason is not known."""
    STALLED = "stalled"
    """Alive but stopped, or without progress."""
    UNKNOWN = "unknown"


OF_THE_PROGRAM = frozenset({ExitReason.ERROR, ExitReason.OOM, ExitReason.UNKNOWN})
"""The program itself is the likely cause: `--max-restarts` counts these."""

_OOM_CODES = frozenset({247})
_HARDWARE_CODES = frozenset({14, 128, 201, 202})
_ERROR_CODES = frozenset({1, 134, 139})
_KILLED_CODES = frozenset({137, 143})
_SIGHUP, _SIGINT, _SIGKILL, _SIGTERM = 1, 2, 9, 15


_KILLED_LOADER = re.compile(
    r"DataLoader worker \(pid \d+\) is killed by signal: (Killed|Terminated)"
)

FAILED_WITH = "failed with "
"""Stands before the error that a program left, to make a sentence of it."""

_MISTAKES = frozenset(
    ("SyntaxError", "IndentationError", "TabError", "ImportError", "ModuleNotFoundError")
)

WRONG_ARGUMENT = "ArgumentError"
"""How a program's message begins when argparse refused the program's own command line."""

NEEDS_TERMINAL = "NeedsTerminal"
"""How a program's message begins when it wanted to ask a person: a debugger, `input()`."""


def classify_exit(
    code: int | None, signal: int | None, *, oom: bool = False, said: str = ""
) -> ExitReason:
    """The failure class of a process from its exit code or signal.

    `oom` is what the platform or the kernel's memory events say; a SIGKILL alone does not prove it.
    `said` is the error that the program left. A loader process that was killed, by the kernel for
    want of memory or by a person, ends the program with an error of torch's: that is a kill too.
    """
    if oom or code in _OOM_CODES:
        return ExitReason.OOM
    is_killed = signal in (_SIGKILL, _SIGTERM, _SIGHUP, _SIGINT) or code in _KILLED_CODES
    if is_killed or (signal is None and _KILLED_LOADER.search(said)):
        return ExitReason.KILLED
    if signal is not None or code in _ERROR_CODES:
        return ExitReason.ERROR
    if code in _HARDWARE_CODES:
        return ExitReason.HARDWARE
    return ExitReason.UNKNOWN


def is_mistake(message: str) -> bool:
    """Whether a program that says this would say the same again: a typo, a module that is not
    there, a wrong flag. Never a time-out, a refused connection or a missing file: those pass."""
    kind = _kind_of(message)
    return kind in _MISTAKES or kind == WRONG_ARGUMENT


def asks_person(message: str) -> bool:
    """Whether the program failed because it has no terminal to ask on: it would ask again."""
    return _kind_of(message) == NEEDS_TERMINAL


def _kind_of(message: str) -> str:
    return message.removeprefix(FAILED_WITH).partition(":")[0]
