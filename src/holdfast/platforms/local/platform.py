# SPDX-License-Identifier: Apache-2.0
"""Agents as processes. They outlive the master that started them: the next one adopts them.

The lifeline keeps them from outliving the job. It is a pipe whose other end only the launcher
holds: when the launcher dies, every agent reads end-of-file and ends.
"""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase, classify_exit
from holdfast.model.order import Order
from holdfast.ports.platform import Sighting
from holdfast.runtime.observe import Level, Say
from holdfast.runtime.private import read_private, require_own

GRACE_S = 15.0

AGAIN_S = 1.0
"""The pause between two tries to start a node whose birth cannot be noted."""

_BIRTH_BYTES = 128


class _Birth(msgspec.Struct, frozen=True):
    """Which process a node is: the kernel may have given the process id to another one since."""

    pid: int
    created: float


class LocalPlatform:
    """Starts, watches and ends agents on this machine."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        *,
        lifeline: int,
        say: Say,
    ) -> None:
        """`folder` has the births of the started agents; it is part of the master's state."""
        self._command = list(command)
        self._env = dict(env)
        self._folder = folder
        self._lifeline = lifeline
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._sightings: asyncio.Queue[Sighting] = asyncio.Queue()
        self._pidfds: dict[NodeId, int] = {}
        self._children: dict[NodeId, subprocess.Popen[bytes]] = {}
        #: Nodes that start as soon as their birth can be noted.
        self._waiting: set[NodeId] = set()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(folder)

    async def launch(self, order: Order) -> None:
        """Start the agent, unless this or an earlier master has done so.

        An agent that runs without a note would be started twice: while no file can be written to
        the state, the start waits.
        """
        node_id = order.node_id
        if node_id in self._waiting or node_id in self._pidfds or self._path(node_id).exists():
            return
        self._waiting.add(node_id)
        is_said = False
        try:
            while node_id in self._waiting:
                try:
                    self._start(node_id)
                    return
                except OSError as exc:
                    why = f"{self._folder} takes no note of it now ({exc.strerror or exc})"
                if not is_said:
                    is_said = True
                    self._see(node_id, Phase.PENDING, message=f"it is not started: {why}")
                    self._say(
                        f"node {node_id} is not started: {why}; it is as soon as there is room for "
                        "a file: free some space",
                        Level.WARNING,
                    )
                await asyncio.sleep(AGAIN_S)
        finally:
            self._waiting.discard(node_id)

    def _start(self, node_id: NodeId) -> None:
        """Start the agent; OSError, and no agent, if it cannot be noted or followed."""
        path = self._path(node_id)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as birth:
                # Reserve the space first: writing the birth into it then needs none.
                _write(birth.fileno(), b"")
                child = self._spawn(node_id)
                if child is not None:
                    self._note(node_id, child, birth)
                    return
        except OSError:
            _forget(path)
            raise
        _forget(path)

    def _spawn(self, node_id: NodeId) -> subprocess.Popen[bytes] | None:
        env = {
            **self._env,
            "HOLDFAST_NODE_ID": str(node_id),
            "HOLDFAST_LIFELINE": str(self._lifeline),
        }
        try:
            return subprocess.Popen(
                self._command,
                env=env,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[self._lifeline] if self._lifeline >= 0 else [],
            )
        except OSError as exc:
            message = f"the agent could not be started: {exc}"
            self._see(node_id, Phase.FAILED, ExitReason.ERROR, message)
            return None

    def _note(self, node_id: NodeId, child: subprocess.Popen[bytes], birth: BinaryIO) -> None:
        try:
            created = psutil.Process(child.pid).create_time()
            _write(birth.fileno(), msgspec.json.encode(_Birth(child.pid, created)))
            birth.close()  # Some file systems report only now that there is no space.
            self._follow(node_id, child.pid)
        except OSError:
            child.kill()
            child.wait()
            raise
        self._children[node_id] = child

    async def remove(self, node_id: NodeId) -> None:
        """SIGTERM, then SIGKILL; the end is reported like any other."""
        if node_id in self._waiting:
            self._waiting.discard(node_id)
            why = "it was removed before it was started"
            self._see(node_id, Phase.GONE, ExitReason.KILLED, why)
            return
        self._signal(node_id, signal.SIGTERM)
        self._loop.call_later(GRACE_S, self._signal, node_id, signal.SIGKILL)

    async def watch(self) -> AsyncIterator[Sighting]:
        """First the agents of an earlier master, then every change."""
        for path in sorted(self._folder.glob("*.json")):
            if path.stem.isascii() and path.stem.isdecimal():  # Other files are not births.
                self._adopt(NodeId(int(path.stem)), path)
        while True:
            yield await self._sightings.get()

    def look_again(self) -> None:
        """Nothing to do: the kernel tells at once when a process ends."""

    async def close(self) -> None:
        self._waiting.clear()
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _adopt(self, node_id: NodeId, path: Path) -> None:
        if node_id in self._pidfds:
            return
        try:
            birth = msgspec.json.decode(read_private(path, _BIRTH_BYTES), type=_Birth)
            if psutil.Process(birth.pid).create_time() == birth.created:
                self._follow(node_id, birth.pid)
                return
        except (psutil.Error, msgspec.DecodeError, ProcessLookupError):
            pass
        self._ended(node_id, ExitReason.LOST, "its process was gone when the master came back")

    def _follow(self, node_id: NodeId, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._pidfds[node_id] = pidfd
        self._loop.add_reader(pidfd, self._exited, node_id)
        self._see(node_id, Phase.PENDING)

    def _exited(self, node_id: NodeId) -> None:
        pidfd = self._pidfds.pop(node_id)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        child = self._children.pop(node_id, None)
        code = child.wait() if child is not None else None
        if code == 0:
            self._path(node_id).unlink(missing_ok=True)
            self._see(node_id, Phase.SUCCEEDED)
        elif code is None:
            # Not a child of this master but of an earlier one: its exit code is unknown here.
            self._ended(node_id, ExitReason.KILLED, "its agent process ended")
        else:
            sig = -code if code < 0 else None
            how = f"by {signal.Signals(sig).name}" if sig else f"with code {code}"
            reason = classify_exit(None if sig else code, sig)
            self._ended(node_id, reason, f"its agent process ended {how}")

    def _ended(self, node_id: NodeId, reason: ExitReason, message: str) -> None:
        self._path(node_id).unlink(missing_ok=True)
        self._see(node_id, Phase.FAILED, reason, message)

    def _see(
        self,
        node_id: NodeId,
        phase: Phase,
        reason: ExitReason | None = None,
        message: str = "",
    ) -> None:
        sighting = Sighting(node_id=node_id, phase=phase, reason=reason, message=message)
        self._sightings.put_nowait(sighting)

    def _signal(self, node_id: NodeId, number: int) -> None:
        pidfd = self._pidfds.get(node_id)
        if pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def _path(self, node_id: NodeId) -> Path:
        return self._folder / f"{node_id}.json"


def _write(file: int, birth: bytes) -> None:
    """Always the same number of bytes, so that the second write needs no more space."""
    if os.pwrite(file, birth.ljust(_BIRTH_BYTES), 0) != _BIRTH_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _forget(path: Path) -> None:
    """Remove a birth, or overwrite it so that it names no process to the next master."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
