# SPDX-License-Identifier: Apache-2.0
"""Looking at a master from outside: its view, its journal, and a way to it that can be moved."""

import json
import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from holdfast.client import AgentClient
from holdfast.core.job.records import decode_record
from holdfast.core.kernel import Record
from holdfast.protocol import messages as m
from holdfast.runtime.journal import SqliteJournal
from holdfast.runtime.token import read_token
from tests.integration.jobs import LIMIT_S, MasterCommand
from tests.waiting import until

JOB = "test"
"""As in `Jobs.master`."""


def client_of(master: MasterCommand, *, scope: int = 0) -> AgentClient:
    """A client that asks the master itself."""
    return AgentClient(f"tcp:{master.address}", read_token(master.token_file), scope=scope)


def observe(master: MasterCommand) -> dict[str, Any]:
    """The job as the master sees it."""
    client = client_of(master)
    try:
        observed = client.ask(m.Observe(follow=False), m.Observed, LIMIT_S)
    finally:
        client.close()
    view: dict[str, Any] = json.loads(observed.state)
    return view


def wait_held(master: MasterCommand, count: int = 1) -> None:
    """Wait until the master holds so many requests of workers that wait."""
    until(lambda: observe(master)["store"]["waiting"] == count, LIMIT_S, f"{count} held requests")


def records_of(state: Path) -> list[Record]:
    """The whole journal of a master that has ended."""
    journal = SqliteJournal.open(state, job=JOB)
    try:
        return [decode_record(entry.payload) for entry in journal.load()]
    finally:
        journal.close()


class Forwarder:
    """An address whose connections end at `target`, which may change, as behind a name."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Wakes the threads that wait in accept and recv.
        shut(self._listener)
        self._threads[0].join(LIMIT_S)
        for end in self._sockets:
            shut(end)
        for thread in self._threads[1:]:
            thread.join(LIMIT_S)
        for end in (*self._sockets, self._listener):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(near)
            host, _, port = self.target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)), LIMIT_S)
            except OSError:
                shut(near)
                continue
            far.settimeout(None)
            self._sockets.append(far)
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=_pump, args=(source, sink), daemon=True)
                self._threads.append(thread)
                thread.start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    shut(source)
    shut(sink)


def shut(end: socket.socket) -> None:
    """Hang up in both directions; who does it first does not matter."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # The other side was first.
