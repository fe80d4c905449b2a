# SPDX-License-Identifier: Apache-2.0
"""A real vault with two workers, and a master that answers when the test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.agent.relay import Relay
from holdfast.agent.vault.vault import Vault
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import Storage
from holdfast.client.connection import AgentClient
from holdfast.client.vault import VaultClient
from holdfast.model.checkpoint import Series, Shape, Version, rank_part
from holdfast.protocol.data import Consumed, Mark
from holdfast.runtime.settings import WorkerPlace
from holdfast.runtime.transport import listen
from tests.hearing import Heard
from tests.integration.patient_master import PatientMaster

TOKEN = b"0123456789abcdef"
SHAPE = Shape(2, shared=False)


@dataclass
class Node:
    """A vault and its two workers."""

    vault: Vault
    master: PatientMaster
    workers: list[VaultClient]
    directory: str
    said: list[str]
    """What the vault told people."""

    async def save(
        self, rank: int, step: int, leases: dict[int, int] | None, *, persist: bool = False
    ) -> None:
        """A rank saves; `leases`: how far it is in its data, None: it reads none."""
        marks = None if leases is None else mark(leases)
        await asyncio.to_thread(self._save, rank, step, marks, persist)

    async def save_both(self, step: int, leases: dict[int, int]) -> None:
        for rank in (0, 1):
            await self.save(rank, step, leases if rank == 0 else {})

    def _save(self, rank: int, step: int, marks: tuple[Mark, ...] | None, persist: bool) -> None:
        worker, part, version = self.workers[rank], rank_part(rank), Version(0, step)
        files, length = lay_out([(f"{part}.bin", 1000)])
        grant = worker.slot(part, step, length)
        with Slot.open(grant.path, writable=True) as slot:
            slot.begin(version)
            slot.seal(SlotMeta(self.directory, part, version, SHAPE, files))
        worker.sealed(part, version, SHAPE, grant.path, persist=persist, marks=marks)


def mark(leases: dict[int, int]) -> tuple[Mark, ...]:
    return (Mark("train", 1, tuple(Consumed(*said) for said in leases.items())),)


@asynccontextmanager
async def node(
    folder: Path,
    directory: str,
    *,
    follows: bool = False,
    keep_last: int = 0,
    open_storage: Callable[[str], Storage] = open_storage,
) -> AsyncIterator[Node]:
    """A node in its first round, whose ranks have agreed to begin from nothing."""
    master, said = PatientMaster(follows), Heard()
    async with contextlib.AsyncExitStack() as stack:
        vault = Vault(master, said, TOKEN, 2, open_storage=open_storage)
        stack.push_async_callback(vault.close)
        vault.joined(0)
        socket = f"unix:{folder}/vault.sock"
        server = await listen(socket, Relay(master, vault), TOKEN)
        stack.push_async_callback(server.close)
        vault.begin_round(1, 0)
        series = Series(directory, slots=2, breakpoint=False, keep_last=keep_last)
        workers = await stack.enter_async_context(two_workers(socket, TOKEN, series))
        yield Node(vault, master, workers, directory, said)


@asynccontextmanager
async def two_workers(
    socket: str, token: bytes, series: Series
) -> AsyncIterator[list[VaultClient]]:
    """The clients of the two workers of round 1 on one node, which have agreed what to restore."""
    async with contextlib.AsyncExitStack() as stack:
        workers = []
        for rank in (0, 1):
            place = WorkerPlace(
                rank=rank,
                local_rank=rank,
                world_size=2,
                local_world_size=2,
                group_world_size=1,
                round=1,
                meeting_point="",
                launcher=0,
            )
            client = VaultClient(AgentClient(socket, token, scope=1), place, is_standalone=False)
            stack.push_async_callback(asyncio.to_thread, client.close)
            workers.append(client)
        begin = [asyncio.to_thread(_begin, worker, series) for worker in workers]
        await asyncio.gather(*begin)
        yield workers


def _begin(worker: VaultClient, series: Series) -> None:
    worker.open_series(series)
    worker.restore()
