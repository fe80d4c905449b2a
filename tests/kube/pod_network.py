# SPDX-License-Identifier: Apache-2.0
"""The network of the fake kubelet's pods: one switch, one address per pod, nothing of it outside.

The switch and every pod are network namespaces that nobody gave a name: each lives as long as a
process that does nothing. These processes die with the thread that started them, so a test that
is killed leaves nothing behind, and the networks of two tests cannot meet.
"""

import asyncio
import ctypes
import itertools
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

GATEWAY = "10.244.0.1"
"""The switch's own address, behind which the pods find the API server."""
SERVICES = "10.96.0.0/16"
"""The API server's --service-cluster-ip-range."""
LIMIT_S = 60.0
CLONE_NEWNET = 0x40000000

Made = TypeVar("Made")


class Namespace:
    """A network namespace, and the process that keeps it."""

    def __init__(self) -> None:
        self._keeper = subprocess.Popen(
            # It says that it is inside before anybody uses it, and is the child of this thread.
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != b"\n":
            raise OSError("no network namespace could be made")
        self.pid = self._keeper.pid
        self.path = Path(f"/proc/{self.pid}/ns/net")

    def ip(self, *commands: str) -> None:
        """Run commands of ip(8) inside."""
        enter = ["nsenter", f"--net={self.path}", "ip", "-batch", "-"]
        text = "\n".join(commands)
        subprocess.run(
            enter, input=text, text=True, check=True, capture_output=True, timeout=LIMIT_S
        )

    def make(self, make: Callable[[], Made]) -> Made:
        """What `make` returns when a thread runs it inside: a socket stays there."""
        made: list[Made] = []

        def inside() -> None:
            with self.path.open("rb") as namespace:
                # Only this thread moves.
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
            made.append(make())

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join(LIMIT_S)
        return made[0]

    def close(self) -> None:
        self._keeper.kill()
        self._keeper.wait(LIMIT_S)
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            if pipe is not None:
                pipe.close()


class Port:
    """Where one pod is plugged in."""

    def __init__(self, switch: Namespace, number: int) -> None:
        self.address = f"10.244.{number // 250}.{number % 250 + 2}"
        self.namespace = Namespace()
        self._switch = switch
        self._wire = f"pod{number}"
        self.namespace.ip(
            "link set lo up",
            f"link add eth0 type veth peer name {self._wire} netns {switch.pid}",
            f"addr add {self.address}/16 dev eth0",
            "link set eth0 up",
            f"route add {SERVICES} dev eth0",
        )
        switch.ip(f"link set {self._wire} master switch up")

    def take(self, address: str) -> None:
        """Answer to the address of a Service too."""
        self.namespace.ip(f"addr replace {address}/32 dev eth0")

    def release(self, address: str) -> None:
        self.namespace.ip(f"addr del {address}/32 dev eth0")

    def forget(self, address: str) -> None:
        """Ask anew who has this address."""
        self.namespace.ip(f"neigh flush to {address}")

    def cut(self) -> None:
        """From now on nothing goes in or out, not even that a connection ended."""
        self.namespace.ip("link set eth0 down")

    def close(self) -> None:
        self.namespace.close()


class Network:
    """The switch, and a way through it to the API server, which listens on this machine only."""

    def __init__(self, api_server: tuple[str, int]) -> None:
        self._numbers = itertools.count(1)
        self._switch = Namespace()
        self._switch.ip(
            "link set lo up",
            "link add switch type bridge",
            f"addr add {GATEWAY}/16 dev switch",
            "link set switch up",
        )
        listener = self._switch.make(lambda: socket.create_server((GATEWAY, 0)))
        self.api_port = int(listener.getsockname()[1])
        self._forwarder = Forwarder(listener, api_server)

    def plug(self) -> Port:
        return Port(self._switch, next(self._numbers))

    def close(self) -> None:
        self._forwarder.close()
        self._switch.close()


class Forwarder:
    """Carries every connection on to an address of this machine."""

    def __init__(self, listener: socket.socket, target: tuple[str, int]) -> None:
        self._listener = listener
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )
        self._thread.start()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._carry, sock=self._listener):
            await self._over.wait()
        carried = asyncio.all_tasks() - {asyncio.current_task()}
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.close()  # The API server is away, and that is how it looks.
            return
        ways = [asyncio.create_task(copy(reader, back)), asyncio.create_task(copy(there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            close_all((writer, back))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(LIMIT_S)
        self._loop.close()


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    except OSError:
        return  # One end is gone; the other is closed next.


def close_all(writers: Iterable[asyncio.StreamWriter]) -> None:
    for writer in writers:
        writer.close()


def reason_against() -> str:
    """Why pods cannot have networks of their own here; empty if they can."""
    for tool in ("ip", "nsenter", "unshare", "setpriv"):
        if shutil.which(tool) is None:
            return f"install {tool} (iproute2, util-linux)"
    try:
        Namespace().close()
    except OSError as error:
        return f"{error}: run the tests as root, with CAP_SYS_ADMIN"
    return ""
