# SPDX-License-Identifier: Apache-2.0
"""The signals that ask a program to end, and those that only tell it something."""

import asyncio
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

END_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class EndSignals:
    """Takes each signal that means the end, and `more`, in the running event loop.

    Signals that come before there is a handler are kept for it. SIGHUP is not taken where it was
    ignored when the program started, as under nohup.
    """

    def __init__(
        self,
        more: Iterable[signal.Signals] = (),
        *,
        first: Callable[[signal.Signals], None] = lambda number: None,
    ) -> None:
        """`first` is told of the first signal, before anything is done about it."""
        self._first: Callable[[signal.Signals], None] | None = first
        self._kept: list[signal.Signals] = []
        self._handle: Callable[[signal.Signals], None] = self._kept.append
        loop = asyncio.get_running_loop()
        for number in END_SIGNALS.union(more):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._take, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)

    def hand_to(self, handle: Callable[[signal.Signals], None]) -> None:
        """Call `handle` for each signal from now on, and at once for those that were kept."""
        self._handle = handle
        kept, self._kept = self._kept, []
        for number in kept:
            handle(number)

    def _take(self, number: signal.Signals) -> None:
        first, self._first = self._first, None
        if first is not None:
            first(number)
        self._handle(number)


def on_end_signals(
    handle: Callable[[signal.Signals], None], more: Iterable[signal.Signals] = ()
) -> None:
    """Call this in the running event loop for each signal that means the end, and for `more`."""
    EndSignals(more).hand_to(handle)


def hold_end_signals() -> None:
    """Keep end signals waiting until `EndSignals` takes them: nothing would be cleaned up
    before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)


@contextmanager
def end_signals_held() -> Iterator[None]:
    """A process that is started here takes end signals when it can act on them, and not before.

    Before a Python program can set handlers for them, they would end it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_notices() -> None:
    """SIGUSR1 and SIGUSR2 end nothing of ours.

    SLURM sends one of them to every process of a job some time before it stops it. Children start
    with both ignored, too: a worker gets them if its program asks for them.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


class Patience:
    """A person's patience: a user who presses Ctrl-C a second time does not want to wait.

    Everything else may be sent more than once for one end: SLURM sends SIGTERM twice at the time
    limit of a job, and systemd and others send it to every process.
    """

    def __init__(self) -> None:
        self._interrupts = 0

    def is_over(self, number: signal.Signals) -> bool:
        """Whether this signal says that the user does not want to wait."""
        self._interrupts += number == signal.SIGINT
        return number == signal.SIGINT and self._interrupts > 1
