# SPDX-License-Identifier: Apache-2.0
"""Keeps a desk up to date: what happened at once, how the job stands within a second."""

import asyncio
from collections.abc import Callable, Coroutine

from holdfast.core.job import events as ev
from holdfast.core.kernel import Event
from holdfast.ports.desk import Desk

NEWS_S = 1.0
"""After something happened, the desk shows how the job stands within this time, and once for all
that happens in it: a view of thousands of nodes is not made a thousand times."""

PROGRESS_S = 15.0
"""How often it shows progress while nothing else happens."""


class Showing:
    """Decides what a desk is told, and when."""

    def __init__(
        self,
        desk: Desk,
        view: Callable[[], dict[str, object]],
        run: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self._desk, self._view, self._run = desk, view, run
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def happened(self, event: Event, text: str) -> None:
        """An event happened that has a sentence for people."""
        self._run(self._desk.tell(_kind(event), text))
        self.changed()

    def changed(self) -> None:
        """The view has changed."""
        self._within(NEWS_S)

    def progressed(self) -> None:
        """A node was heard; perhaps the job stepped."""
        self._within(PROGRESS_S)

    def settled(self, plan_id: str, *, ok: bool, text: str) -> None:
        """A plan is done, or refused."""
        self._run(self._desk.answer(plan_id, ok=ok, text=text))

    def show(self) -> None:
        """Show how the job stands now."""
        self.stop()
        self._run(self._desk.show(self._view()))

    def stop(self) -> None:
        """Show nothing more by itself."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _within(self, seconds: float) -> None:
        at = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() <= at:
            return
        self.stop()
        self._timer = self._loop.call_at(at, self.show)


def _kind(event: Event) -> str:
    """One word for what happened; success and failure have different ones."""
    if isinstance(event, ev.JobFinished):
        return "JobSucceeded" if event.ok else ("JobStopped" if event.stopped else "JobFailed")
    return type(event).__name__
