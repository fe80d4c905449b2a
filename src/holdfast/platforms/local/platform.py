# SPDX-License-Identifier: Apache-2.0
"""Agents as processes. They outlive the master that started them: the next one adopts them.

What keeps them from outliving the job is the lifeline, a pipe whose other end only the launcher
holds: when the launcher dies, every agent reads end-of-file and goes.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase, classify_exit
from holdfast.model.order import Order
from holdfast.ports.platform import Sighting
from holdfast.runtime.private import require_own, write_private

GRACE_S = 15.0


class _Birth(msgspec.Struct, frozen=True):
    """Which process a node is: a process id alone may have been given to another since."""

    pid: int
    created: float


class LocalPlatform:
    """Starts, watches and ends agents on this machine."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], folder: Path, *, lifeline: int
    ) -> None:
        """`folder` remembers who was started; it is part of the master's state."""
        self._command = list(command)
        self._env = dict(env)
        self._folder = folder
        self._lifeline = lifeline
        self._loop = asyncio.get_running_loop()
        self._sightings: asyncio.Queue[Sighting] = asyncio.Queue()
        self._pidfds: dict[NodeId, int] = {}
        self._children: dict[NodeId, subprocess.Popen[bytes]] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(folder)

    async def launch(self, order: Order) -> None:
        """Start the agent, unless this or an earlier master did so already."""
        path = self._path(order.node_id)
        if order.node_id in self._pidfds or path.exists():
            return
        env = {
            **self._env,
            "HOLDFAST_NODE_ID": str(order.node_id),
            "HOLDFAST_LIFELINE": str(self._lifeline),
        }
        try:
            child = subprocess.Popen(
                self._command,
                env=env,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[self._lifeline] if self._lifeline >= 0 else [],
            )
        except OSError as exc:
            message = f"the agent could not be started: {exc}"
            self._see(order.node_id, Phase.FAILED, ExitReason.ERROR, message)
            return
        created = psutil.Process(child.pid).create_time()
        write_private(path, msgspec.json.encode(_Birth(child.pid, created)))
        self._children[order.node_id] = child
        self._follow(order.node_id, child.pid)

    async def remove(self, node_id: NodeId) -> None:
        """SIGTERM, then SIGKILL; the end is seen like any other."""
        self._signal(node_id, signal.SIGTERM)
        self._loop.call_later(GRACE_S, self._signal, node_id, signal.SIGKILL)

    async def watch(self) -> AsyncIterator[Sighting]:
        """First what an earlier master started, then every change."""
        for path in sorted(self._folder.glob("*.json")):
            self._adopt(NodeId(int(path.stem)), path)
        while True:
            yield await self._sightings.get()

    def look_again(self) -> None:
        """Nothing to do: the kernel tells at once when a process ends."""

    async def close(self) -> None:
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _adopt(self, node_id: NodeId, path: Path) -> None:
        if node_id in self._pidfds:
            return
        try:
            birth = msgspec.json.decode(path.read_bytes(), type=_Birth)
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
            # Not our child but an earlier master's: how it ended is not for us to know.
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
