# SPDX-License-Identifier: Apache-2.0
"""Streams in memory for real drivers: asyncio's transports, with the bytes that the drivers write.
The network (sim/network.py) decides when bytes arrive. It may split them anywhere, as TCP does."""

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, cast

from holdfast.sim.loop import Process, VirtualLoop, current_process
from holdfast.sim.network import DOWN, INSIDE, UP, Network, Pipe

BREAK_S = 0.001
"""How soon both ends learn that their stream is broken."""


class _Socket:
    """The few methods of sockets that drivers call."""

    family = -1

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    def getsockname(self) -> tuple[str, int]:
        return self._address


class _End(asyncio.Transport):
    """One end of a stream: what a protocol writes to."""

    def __init__(self, wire: "Wire", way: str, process: Process) -> None:
        """`way` is the direction in which this end sends."""
        super().__init__({"socket": _Socket((process.place, 0))})
        self.process = process
        self.protocol: asyncio.Protocol | None = None
        self._wire = wire
        self._way = way
        self._is_open = True

    def write(self, data: Any) -> None:
        if self._is_open and self.process.is_alive:
            self._wire.carry(self._way, bytes(data))

    def close(self) -> None:
        """Close this end; what was written before still arrives."""
        if self._is_open and self.process.is_alive:
            self._wire.hang_up(self._way)
            self.lose()

    abort = close

    def is_closing(self) -> bool:
        return not self._is_open

    def receive(self, data: bytes) -> None:
        if self._is_open and self.protocol is not None:
            self.process.run(self.protocol.data_received, data)

    def lose(self) -> None:
        """The stream is over at this end: tell the protocol later, as asyncio does."""
        if self._is_open:
            self._is_open = False
            self._wire.end_lost()
            if self.protocol is not None:
                lost = partial(self.process.run, self.protocol.connection_lost, None)
                asyncio.get_running_loop().call_soon(lost)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Ignored: the buffer is never full."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        raise AssertionError("nobody pauses while the buffer is never full")


class Wire:
    """One connection."""

    def __init__(
        self, network: Network, rng: Random, place: str, client: Process, server: Process
    ) -> None:
        self.place = place
        self._rng = rng
        self._network = network
        self._pipes = {way: Pipe(network, place, way) for way in (UP, DOWN)}
        self.client = _End(self, UP, client)
        self.server = _End(self, DOWN, server)
        self._receivers = {UP: self.server, DOWN: self.client}
        self._ends_open = 2
        self._number = network.add(self)

    @property
    def is_open(self) -> bool:
        return self._ends_open > 0

    def carry(self, way: str, data: bytes) -> None:
        """Bring bytes to the other end, sometimes in two pieces."""
        cut = _cut(data, self._rng.random()) if self._rng.random() < 0.1 else 0
        for piece in (data[:cut], data[cut:]):
            if piece:
                self._pipes[way].carry(partial(self._receivers[way].receive, piece))

    def hang_up(self, way: str) -> None:
        """This side sends nothing more."""
        self._pipes[way].carry(self._receivers[way].lose)

    def process_ended(self, process: Process, *, is_told: bool) -> None:
        """A process is dead: its kernel closes its streams, unless the machine is gone too."""
        for end, way in ((self.client, UP), (self.server, DOWN)):
            if end.process is process and not end.is_closing():
                end.lose()
                if is_told:
                    self.hang_up(way)

    def abort(self, late_s: float) -> None:
        """The stream breaks: see Link.abort."""
        clock = self._network.clock
        clock.after(BREAK_S, self.client.lose)
        if late_s:
            self._pipes[UP].stand_still(clock.now + late_s)
            self.hang_up(UP)
        else:
            clock.after(BREAK_S, self.server.lose)

    def let_through(self) -> None:
        for pipe in self._pipes.values():
            pipe.let_through()

    def end_lost(self) -> None:
        self._ends_open -= 1
        if self._ends_open == 0:
            self._network.forget(self._number)


def _cut(data: bytes, share: float) -> int:
    """Where to cut whole frames in two, at this share of them: never at an end, so that it is two
    pieces always, and in a frame that their number alone decides.

    How long frames are must decide nothing: some have names of folders in them, which are others on
    another machine.
    """
    begins, end = [0], _frame_end(data, 0)
    while end < len(data):
        begins.append(end)
        end = _frame_end(data, end)
    number, within = divmod(share * len(begins), 1.0)
    begin, end = (*begins, len(data))[int(number) : int(number) + 2]
    return begin + 1 + int(within * (end - begin - 1))


def _frame_end(data: bytes, begin: int) -> int:
    """See protocol/codec.py: a frame begins with how many bytes follow."""
    return begin + 4 + int.from_bytes(data[begin : begin + 4], "little")


class _Server:
    """A listening server."""

    def __init__(
        self, wires: "Wires", process: Process, factory: Callable[[], Any], address: tuple[str, int]
    ) -> None:
        self.process = process
        self.factory = factory
        self.sockets = [_Socket(address)]
        self._wires = wires
        self._address = address

    async def start_serving(self) -> None:
        self._wires.servers[self._address] = self

    def close(self) -> None:
        if self._wires.servers.get(self._address) is self:
            del self._wires.servers[self._address]


class Wires:
    """The listening servers, and every connection."""

    def __init__(self, loop: VirtualLoop, network: Network, rng: Random) -> None:
        self._loop = loop
        self._network = network
        self._rng = rng
        self.servers: dict[tuple[str, int], _Server] = {}
        self._wires: list[Wire] = []

    async def create_server(self, factory: Callable[[], Any], host: str, port: int) -> _Server:
        process = current_process()
        assert process is not None
        return _Server(self, process, factory, (host, port))

    async def create_connection(
        self, factory: Callable[[], Any], host: str, port: int
    ) -> tuple[asyncio.Transport, Any]:
        process = current_process()
        assert process is not None
        # Inside a machine nothing is cut off and nothing is slow.
        place = process.place if host != process.place else f"{INSIDE}{host}"
        if self._network.is_blocked(place, UP) or self._network.is_blocked(place, DOWN):
            await self._loop.create_future()  # The client has a time-out.
        await asyncio.sleep(2 * self._network.delay(place))
        server = self.servers.get((host, port))
        if server is None or not server.process.is_alive or not process.is_alive:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        wire = Wire(self._network, self._rng, place, process, server.process)
        self._wires.append(wire)
        protocol = wire.client.protocol = factory()
        server.process.run(self._accept, wire, server)
        protocol.connection_made(wire.client)
        return wire.client, protocol

    def _accept(self, wire: Wire, server: _Server) -> None:
        protocol = wire.server.protocol = cast(asyncio.Protocol, server.factory())
        protocol.connection_made(wire.server)

    def process_ended(self, process: Process, *, is_told: bool) -> None:
        """Close everything that a process had open; `is_told`: the other ends learn of it."""
        for wire in self._wires:
            wire.process_ended(process, is_told=is_told)
        self._wires = [wire for wire in self._wires if wire.is_open]
        for address, server in list(self.servers.items()):
            if server.process is process:
                del self.servers[address]
