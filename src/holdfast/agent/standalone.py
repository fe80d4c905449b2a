# SPDX-License-Identifier: Apache-2.0
"""A vault without an agent and without a master, for training under plain python or torchrun.

It is the same vault with the same ledger of checkpoints, for one node and without a journal. It
lives as long as the launcher that it was told to watch, or, without one, as long as a process of
the training is connected. Then it brings to storage what is newest, and removes its memory.
"""

import argparse
import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.vault.vault import Vault
from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.checkpoints import Checkpoints, Handled
from holdfast.core.job.commands import Push, Reply
from holdfast.core.kernel import Tick
from holdfast.model.errors import HoldfastError
from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round
from holdfast.model.world import Member, World
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.protocol.services import METHODS, Answerer
from holdfast.runtime.observe import sayer
from holdfast.runtime.signals import ignore_notices
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, Server, listen

LINGER_S = 1.0
"""A process that closes one Checkpointer and opens another within this time finds the same
vault."""

FLUSH_S = 600.0
"""How long the vault may take at its end to bring what is left to storage."""

_NODE = NodeId(0)
_NOT_COVERED = (
    "checkpoints in memory survive a crash of the training process only while its launcher lives, "
    "and not the loss of this machine; `holdfast run` covers both"
)


class LocalLedger:
    """The master's ledger of checkpoints for one node: asked and answered in this process."""

    def __init__(self, nproc: int) -> None:
        self.pushed: Callable[[c.CheckpointPush], None] = lambda body: None
        self._nproc = nproc
        self._machine = Checkpoints()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._waiting: dict[int, Callable[[m.AnyMessage], None]] = {}
        self._calls = 0
        self._timer: asyncio.TimerHandle | None = None
        self._feed(ev.MasterStarted(secrets.token_hex(4)))

    def begin_round(self, round_number: int) -> None:
        """The workers were started, for the first time or again."""
        member = Member(
            node_id=_NODE,
            incarnation=Incarnation(1),
            node_rank=NodeRank(0),
            nproc=self._nproc,
            host="localhost",
            store_port=0,
        )
        world = World(
            round=Round(round_number), generation=Generation(round_number), members=(member,)
        )
        self._feed(ev.WorldFormed(world, "the workers were started", planned=False))

    def call(
        self,
        body: m.AnyMessage,
        answered: Callable[[m.AnyMessage], None],
        session: str = "",
        seq: int = 0,
    ) -> int:
        assert isinstance(body, c.CheckpointCall)
        self._calls += 1
        self._waiting[self._calls] = answered
        self._feed(ev.CheckpointRequested(_NODE, 0, self._calls, body))
        return self._calls

    def forget(self, number: int) -> None:
        self._waiting.pop(number, None)

    def _feed(self, event: Handled) -> None:
        now = self._loop.time() - self._began
        for command in self._machine.handle(event, now).commands:
            # Not at once: the caller does not have the number of its call yet.
            self._loop.call_soon(self._execute, command)
        at = self._machine.deadline()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = (
            None if at is None else self._loop.call_at(self._began + at, self._feed, Tick())
        )

    def _execute(self, command: object) -> None:
        match command:
            case Reply():
                answered = self._waiting.pop(command.call, None)
                if answered is not None:
                    answered(command.body)
            case Push():
                assert isinstance(command.body, c.CheckpointPush)
                self.pushed(command.body)


class Desk:
    """Takes the workers' requests, and notices when no worker is left."""

    def __init__(self, vault: Vault, ledger: LocalLedger, *, gone: Callable[[], None]) -> None:
        """`gone` is called when no process has been connected for LINGER_S."""
        self._vault = vault
        self._ledger = ledger
        self._gone = gone
        self._round = 0
        self._links = 0
        self._loop = asyncio.get_running_loop()
        self._lingering: asyncio.TimerHandle | None = None

    def opened(self, link: Link) -> None:
        self._links += 1
        if self._lingering is not None:
            self._lingering.cancel()

    def received(self, link: Link, frame: m.Frame) -> None:
        body = frame.body
        method = METHODS.get(type(body))
        if method is None or method.answerer is not Answerer.VAULT:
            refusal = f"there is no agent here that could answer {type(body).__name__}"
            link.send(m.Refused("rejected", refusal), frame.call)
            return
        if isinstance(body, c.SeriesOpen) and body.round > self._round:
            self._round = body.round
            self._ledger.begin_round(body.round)
            self._vault.begin_round(body.round, group_rank=0)
        self._vault.handle(link, frame)

    def closed(self, link: Link) -> None:
        self._vault.link_closed(link)
        self._links -= 1
        if self._links == 0:
            self._lingering = self._loop.call_later(LINGER_S, self._gone)


async def serve(options: argparse.Namespace) -> None:
    """Be the vault of one node until it is not needed any more."""
    loop = asyncio.get_running_loop()
    say = sayer("holdfast")
    path = Path(options.socket)
    over = asyncio.Event()
    _watch(options.launcher, over)
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, over.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_notices()
    ledger = LocalLedger(options.nproc)
    token = read_token(path.parent / "token")
    vault = Vault(ledger, say, token, options.nproc)
    vault.joined(_NODE)
    ledger.pushed = vault.pushed
    desk = Desk(vault, ledger, gone=over.set if options.launcher is None else lambda: None)
    try:
        path.unlink(missing_ok=True)
        server = await listen(f"unix:{path}", desk, token)
        os.write(options.ready, b"1")
        os.close(options.ready)
        say(_NOT_COVERED)
        await over.wait()
        await _close_desk(server, path)
        await vault.flush(FLUSH_S)
        await vault.settle()
    finally:
        await vault.close()


def _watch(launcher: int | None, over: asyncio.Event) -> None:
    """Note the end of the launcher, whatever ends it."""
    if launcher is None:
        return
    try:
        descriptor = os.pidfd_open(launcher)
    except ProcessLookupError:
        over.set()
        return
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        over.set()

    loop.add_reader(descriptor, ended)


async def _close_desk(server: Server, path: Path) -> None:
    """Take no more requests; a process that comes now finds no socket and starts another vault."""
    for name in (path, path.parent / "token", path.parent / "lock"):
        name.unlink(missing_ok=True)
    await server.close()
    for folder in (path.parent, path.parent.parent):
        try:
            folder.rmdir()
        except OSError:
            return  # Another process uses it.


def main() -> int:
    """Run as `python -m holdfast.agent.standalone`; started by client/standalone.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--ready", type=int, required=True, help="a descriptor to report on")
    parser.add_argument("--launcher", type=int, help="the process with which this one ends")
    try:
        asyncio.run(serve(parser.parse_args()))
    except HoldfastError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
