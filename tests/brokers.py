# SPDX-License-Identifier: Apache-2.0
"""A real NATS server with JetStream for tests, on a port from the kernel, and its producers."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from tests.waiting import until

START_S = 60.0


class Broker:
    """One server. It keeps its port and its streams when it is stopped and started again."""

    def __init__(self, server: str, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._port = -1
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self) -> None:
        home = str(self._folder)
        command = [self._server, "-js", "-sd", f"{home}/data", "-l", f"{home}/log"]
        command += ["-a", "127.0.0.1", "-p", str(self._port), "--ports_file_dir", home]
        process = self._process = subprocess.Popen(command)

        def address() -> str:
            assert process.poll() is None, (self._folder / "log").read_text()
            file = self._folder / f"nats-server_{process.pid}.ports"
            try:
                return str(json.loads(file.read_text())["nats"][0])
            except (FileNotFoundError, ValueError):
                return ""

        self.url = until(address, START_S, "the port of nats-server")
        self._port = int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(START_S)
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def do(self, what: Callable[[JetStreamContext], Awaitable[object]]) -> None:
        """Something to the broker, as its administrator."""

        async def connected() -> None:
            client = Client()
            await client.connect(self.url)
            await what(client.jetstream(timeout=START_S))
            await client.close()

        asyncio.run(connected())

    def add(self, *partitions: str) -> None:
        async def add(broker: JetStreamContext) -> None:
            for name in partitions:
                await broker.add_stream(name=name, subjects=[name])

        self.do(add)

    def write(self, partition: str, records: Sequence[bytes]) -> None:
        async def write(broker: JetStreamContext) -> None:
            for record in records:
                await broker.publish(partition, record)

        self.do(write)


@contextmanager
def nats_server(folder: Path) -> Iterator[Broker]:
    """A running broker; the test skips if there is no server to run."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    server = shutil.which("nats-server", path=places)
    if server is None:
        pytest.skip("there is no nats-server: scripts/setup fetches it as root")
    # The server's own folder: its files do not mix with those of the test.
    home = folder / f"broker-{os.getpid()}"
    home.mkdir()
    broker = Broker(server, home)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()
