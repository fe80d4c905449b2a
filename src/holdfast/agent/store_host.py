# SPDX-License-Identifier: Apache-2.0
"""The store server of the next round, kept ready on every node that could lead it."""

import asyncio
import os
from collections.abc import Callable, Mapping

from holdfast.agent.processes import Processes, RunMode, Service, WorkerOrder

START_S = 10.0
_LINE_BYTES = 64


class StoreHost:
    """At most two servers: the one that the present round uses, and a fresh one for the next."""

    def __init__(self, processes: Processes, offer: Callable[[int], None]) -> None:
        self._processes = processes
        self._offer = offer
        self._loop = asyncio.get_running_loop()
        self._used: Service | None = None
        self._fresh: Service | None = None
        self._port = 0
        self._preparing = False

    @property
    def port(self) -> int:
        """Of the fresh server; 0 if there is none."""
        return self._port if self._fresh is not None and self._fresh.is_running else 0

    def round_begins(self, store_port: int) -> None:
        """End the server of the previous round, and note whether the new one uses our fresh
        server."""
        if self._used is not None:
            self._used.end()
            self._used = None
        if self._fresh is not None and store_port == self._port:
            self._used, self._fresh, self._port = self._fresh, None, 0

    async def prepare(self, env: Mapping[str, str]) -> None:
        """Start a fresh server from a warm spare, if there is a spare, and offer it."""
        if self.port or self._preparing:
            return
        self._preparing = True
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        # Not the pipe: the agent reads only the port from it, and a warning must not end the
        # server.
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            order = WorkerOrder(
                local_rank=-1,
                argv=("holdfast.torch.elastic.store_server",),
                mode=RunMode.MODULE,
                env=env,
                stdout=write_end,
                stderr=nowhere,
                progress="",
            )
            service = await self._processes.start_service(order)
            os.close(write_end)
            write_end = -1
            if service is not None:
                await self._await_port(service, read_end)
        finally:
            self._preparing = False
            os.close(read_end)
            os.close(nowhere)
            if write_end >= 0:
                os.close(write_end)

    async def _await_port(self, service: Service, read_end: int) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(read_end, readable.set)
        try:
            await asyncio.wait_for(readable.wait(), START_S)
            self._port = int(os.read(read_end, _LINE_BYTES))
        except (TimeoutError, ValueError):
            service.end()  # No torch in the spare, or another problem: rank 0 serves instead.
            return
        finally:
            self._loop.remove_reader(read_end)
        self._fresh = service
        service.on_exit = lambda: self._ended(service)
        self._offer(self._port)

    def _ended(self, service: Service) -> None:
        """A server that died by itself must not be offered any longer."""
        if service is self._fresh:
            self._fresh = None
            self._offer(0)

    def close(self) -> None:
        services = (self._used, self._fresh)
        self._used = self._fresh = None
        for service in filter(None, services):
            service.end()
