# SPDX-License-Identifier: Apache-2.0
"""The network between a client and the API server, as a thing that tests can cut."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.platforms.kubernetes.api import WATCH_S, Api
from holdfast.platforms.kubernetes.config import Access
from tests.kube.cluster import Cluster


class Line:
    """Carries bytes until it is cut, and again when it is mended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._open: set[asyncio.StreamWriter] = set()
        self._forgotten: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self.port = 0

    async def lay(self) -> asyncio.Server:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def cut(self) -> None:
        self._is_cut = True
        for writer in self._open:
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    def forget(self) -> None:
        """Carry nothing more on the connections that are open, and leave them open: as a load
        balancer does that has forgotten a flow. New connections work."""
        self._forgotten |= self._open

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            far_reader, far = await asyncio.open_connection(self._cluster.address, 6443)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, far}
        for source, sink in ((reader, far), (far_reader, writer)):
            task = asyncio.create_task(self._copy(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(2**16):
                if sink not in self._forgotten:
                    sink.write(piece)
                    await sink.drain()
        except OSError:
            pass
        sink.transport.abort()
        self._open.discard(sink)


@asynccontextmanager
async def lined(
    cluster: Cluster, folder: Path, *, watch_s: float = WATCH_S
) -> AsyncIterator[tuple[Line, Api]]:
    """A client behind a line."""
    line = Line(cluster)
    server = await line.lay()
    config = json.loads(cluster.kubeconfig().read_text())
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{line.port}"
    path = folder / f"lined-{line.port}"
    path.write_text(json.dumps(config))
    api = Api(Access.find(path), watch_s=watch_s)
    try:
        yield line, api
    finally:
        await api.close()
        line.cut()
        server.close()
