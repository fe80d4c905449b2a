# SPDX-License-Identifier: Apache-2.0
"""Connections that have proved nothing yet, on every port that listens.

Any program that can reach a port can connect to it. So a connection takes no place that other peers
need: until it has proved what its port asks for it is a *stranger*, one of a limited number, and
when there are too many the oldest is cut for the newest. A flood can cut its own connections only
as fast as it opens them, and a peer that knows what to say needs a few milliseconds to say it.
"""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial

HANDSHAKE_S = 10.0
"""A stranger that has proved nothing by then is cut."""

BACKLOG = 65535
ACCEPT_PAUSE_S = 0.1
TURNS = 16
"""Turns of the loop that a stranger has, at least, while a flood comes in through a TLS door."""

Cut = Callable[[], None]


class Strangers:
    """The strangers of one port, the oldest first. Not for several threads at once."""

    def __init__(self, limit: int) -> None:
        """At most `limit`, and never more than half of the files that this process may open."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            limit = min(limit, files // 2)
        self.limit = limit
        self._cuts: dict[object, Cut] = {}

    def enter(self, stranger: object, cut: Cut) -> None:
        """A new one; `cut` ends its connection."""
        if len(self._cuts) >= self.limit:
            self.cut_oldest()
        self._cuts[stranger] = cut

    def leave(self, stranger: object) -> None:
        """It has proved itself, or is gone."""
        self._cuts.pop(stranger, None)

    def cut_oldest(self) -> None:
        """Make room, if there is any stranger."""
        oldest = next(iter(self._cuts), None)
        if oldest is not None:
            self._cuts.pop(oldest)()


class TlsDoor:
    """Listening sockets whose connections get a protocol once their TLS stands.

    Servers of asyncio have TLS of their own, but say nothing of a connection before its TLS stands:
    it could neither be counted nor cut.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        factory: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext,
        strangers: Strangers,
    ) -> None:
        self._listeners = listeners
        self._factory = factory
        self._tls = tls
        self._strangers = strangers
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._listen(listener)

    def close(self) -> None:
        """Stop listening; break off connections that have no protocol yet."""
        self._is_closed = True
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        for task in self._tasks:
            task.cancel()

    def _listen(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(1 + self._strangers.limit // TURNS):
            try:
                peer, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # It broke already, or there are no descriptors, which may last.
                self._strangers.cut_oldest()
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._listen, listener)
                return
            peer.setblocking(False)
            self._strangers.enter(peer, partial(interrupt, peer))
            task = self._loop.create_task(self._secure(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _secure(self, peer: socket.socket) -> None:
        try:
            # A peer that breaks off or speaks no TLS is no concern of this server.
            with contextlib.suppress(OSError):
                await self._loop.connect_accepted_socket(
                    self._factory, peer, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
                )
        finally:
            self._strangers.leave(peer)


def interrupt(peer: socket.socket) -> None:
    """Break off a connection that another thread or a transport uses; its user has to close it."""
    with contextlib.suppress(OSError):
        # Not the TLS socket's own: it would take the state away from under its user.
        socket.socket.shutdown(peer, socket.SHUT_RDWR)


async def open_door(
    host: str,
    port: int,
    factory: Callable[[], asyncio.BaseProtocol],
    strangers: Strangers,
    *,
    tls: ssl.SSLContext | None,
    tune: Callable[[socket.socket], None] = lambda listener: None,
) -> tuple["asyncio.Server | TlsDoor", int]:
    """Listen on the port (0: the kernel chooses), which is returned; OSError if that fails.

    The protocols count themselves as strangers; until their TLS stands, the door counts them.
    """
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        factory, host, port, backlog=BACKLOG, reuse_address=True, start_serving=False
    )
    for listener in server.sockets:
        tune(listener)
    bound: int = server.sockets[0].getsockname()[1]
    if tls is None:
        await server.start_serving()
        return server, bound
    # The same sockets, bound to all that the host's name stands for, under an owner of our own.
    listeners = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    server.close()
    return TlsDoor(listeners, factory, tls, strangers), bound
