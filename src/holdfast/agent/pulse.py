# SPDX-License-Identifier: Apache-2.0
"""The agent's beats: liveness, progress and use, and the lease that their answers renew."""

import asyncio
from collections.abc import Callable

import psutil
from msgspec.structs import replace

from holdfast.agent.group import Group
from holdfast.agent.processes import Processes
from holdfast.agent.stream import MasterStream
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import Tally

EARLY_BEATS_S = (0.2, 0.4, 0.8, 1.6, 3.2)
"""When beats are sent after a start: they report the first step sooner than the next regular beat
would."""


class Pulse:
    """Beats for as long as the agent is attached."""

    def __init__(
        self,
        stream: MasterStream,
        processes: Processes,
        *,
        group: Callable[[], Group | None],
        tally: Callable[[], Tally | None],
        is_warm: Callable[[], bool | None],
        renewed: Callable[[float], None],
    ) -> None:
        """`renewed` is told until when (loop time) the lease now runs."""
        self._stream = stream
        self._processes = processes
        self._group = group
        self._tally = tally
        self._is_warm = is_warm
        self._renewed = renewed
        self._loop = asyncio.get_running_loop()
        self._beat_s = self._lease_s = 0.0
        self._regular: asyncio.TimerHandle | None = None
        self._early: list[asyncio.TimerHandle] = []
        self._seen: dict[int, psutil.Process] = {}

    def begin(self, welcome: m.Attached, *, sent_at: float) -> None:
        """The master answered an attach that was sent at `sent_at`."""
        self._beat_s, self._lease_s = welcome.beat_s, welcome.lease_s
        self._renewed(sent_at + self._lease_s)
        self._arm()

    def workers_started(self) -> None:
        """Report the first step as soon as it is there."""
        self._cancel_early()
        self._early = [
            self._loop.call_later(pause_s, self._beat_early) for pause_s in EARLY_BEATS_S
        ]

    def stop(self) -> None:
        self._cancel_early()
        if self._regular is not None:
            self._regular.cancel()

    def _arm(self) -> None:
        if self._regular is not None:
            self._regular.cancel()
        self._regular = self._loop.call_later(self._beat_s, self._beat_regularly)

    def _beat_regularly(self) -> None:
        self._beat()
        self._arm()

    def _beat_early(self) -> None:
        if self._beat().first_step_ago_s >= 0:
            self._cancel_early()

    def _cancel_early(self) -> None:
        for timer in self._early:
            timer.cancel()
        self._early = []

    def _beat(self) -> m.Beat:
        cpu, memory = self._use()
        group = self._group()
        idle = m.Beat(0, 0, -1, -1.0, -1.0, cpu, memory)
        beat = idle if group is None else group.beat(cpu, memory)
        beat = replace(beat, checkpoints=self._tally(), warm=self._is_warm())
        sent_at = self._loop.time()

        def answered(body: m.AnyMessage) -> None:
            if isinstance(body, m.Done):
                self._renewed(sent_at + self._lease_s)

        self._stream.beat(beat, answered)
        return beat

    def _use(self) -> tuple[float, int]:
        """Cores (since the last look) and bytes in use by the workers."""
        cpu, memory = 0.0, 0
        alive = {worker.pid for worker in self._processes.workers}
        self._seen = {pid: process for pid, process in self._seen.items() if pid in alive}
        for pid in alive:
            try:
                process = self._seen.setdefault(pid, psutil.Process(pid))
                cpu += process.cpu_percent(None) / 100
                memory += process.memory_info().rss
            except psutil.Error:
                self._seen.pop(pid, None)
        return cpu, memory
