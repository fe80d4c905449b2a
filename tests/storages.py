# SPDX-License-Identifier: Apache-2.0
"""Storages for tests, a real S3 server among them, and checkpoints to put on them."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import fsspec
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.manifest import Committed, find_committed
from holdfast.checkpoint.persist import load_part, part_length, write_part
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.checkpoint.storage_port import (
    CrcOf,
    FencedStorage,
    Moved,
    Patience,
    Storage,
    crc_of,
)
from holdfast.model.checkpoint import SHARED, FileEntry, Series, Shape, Version, rank_part
from holdfast.protocol.checkpoints import CommitOrder

IMPATIENT = Patience(limit_s=0.0)

Files = Mapping[str, bytes]
State = Mapping[str, Files]
"""The files of every part."""


class Failing(PosixStorage):
    """Writes fail the first few times, as those of a disk that is being replaced."""

    def __init__(self, directory: str, code: int, times: int) -> None:
        super().__init__(directory)
        self.code = code
        self.left = times

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        if self.left > 0:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code), path)
        return super().write(path, data, writers, moved, crc_of)


@contextmanager
def s3_server() -> Iterator[str]:
    """A server that speaks S3, on a port from the kernel; yields the URL of a bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    before = {name: os.environ.get(name) for name in _S3_SETTINGS}
    host, port = server.get_host_and_port()
    os.environ.update(_S3_SETTINGS, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    bucket = f"bucket-{port}"
    try:
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
        yield f"s3://{bucket}"
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # They know the server's port.
        server.stop()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_S3_SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ENDPOINT_URL": "",
    "AWS_MAX_ATTEMPTS": "1",
    "NO_PROXY": "127.0.0.1",
}


def make(storage: Storage, path: str, content: bytes = b"1") -> None:
    """A small file, with the directory that it is in."""
    storage.write(path, memoryview(content), 1)


class Later(FencedStorage):
    """The same storage when nothing in it has changed for so long."""

    def __init__(self, storage: Storage, later_s: float) -> None:
        super().__init__(storage, lambda: None)
        self.entries = lambda path: {
            name: age_s + later_s for name, age_s in storage.entries(path).items()
        }


def make_state(seed: int, ranks: int = 2, size: int = 50_000) -> dict[str, dict[str, bytes]]:
    """A small state with a shared part: sizes on and off whole pages, names in folders."""
    rng = random.Random(seed)
    state = {SHARED: {"shared.safetensors": rng.randbytes(size), "shared.json": b"{}" * seed}}
    for rank in range(ranks):
        name = rank_part(rank)
        state[name] = {f"{name}.json": rng.randbytes(4096), f"rng/{name}.bin": rng.randbytes(7)}
    return state


def fill_slot(path: Path, series: Series, version: Version, part: str, files: Files) -> Slot:
    """A sealed slot with these files."""
    placed, length = lay_out((name, len(content)) for name, content in files.items())
    slot = Slot.create(path, length)
    slot.begin(version)
    for place in placed:
        slot.data[place.offset : place.offset + place.length] = files[place.name]
    slot.seal(SlotMeta(series.directory, part, version, _shape(), placed))
    return slot


def write_state(
    storage: Storage,
    series: Series,
    version: Version,
    state: State,
    attempt: str,
    scratch: Path,
    patience: Patience = IMPATIENT,
) -> tuple[FileEntry, ...]:
    """Write all parts, without a commit."""
    entries: list[FileEntry] = []
    for part, files in state.items():
        path = scratch / f"{part}.slot"
        slot = fill_slot(path, series, version, part, files)
        path.unlink()
        with slot:
            entries += write_part(storage, series, attempt, slot, patience=patience).files
    return tuple(entries)


def order_for(
    series: Series, version: Version, attempt: str, entries: tuple[FileEntry, ...]
) -> CommitOrder:
    """The order that a master gives when all parts are written."""
    return CommitOrder(series.directory, version, _shape(), attempt, entries)


def save(
    storage: Storage,
    series: Series,
    version: Version,
    state: State,
    attempt: str,
    scratch: Path,
) -> list[str]:
    """Write all parts and commit them."""
    entries = write_state(storage, series, version, state, attempt, scratch)
    order = order_for(series, version, attempt, entries)
    return commit(storage, series, order, patience=IMPATIENT)


def load(
    storage: Storage, series: Series, version: Version, scratch: Path
) -> dict[str, dict[str, bytes]]:
    """Read a checkpoint back through slots."""
    committed = find_committed(storage, series, version)
    parts = dict.fromkeys(file.part for file in committed.manifest.files)
    return {part: load_files(storage, series, committed, part, scratch) for part in parts}


def load_files(
    storage: Storage, series: Series, committed: Committed, part: str, scratch: Path
) -> dict[str, bytes]:
    """Read one part back through a slot."""
    path = scratch / f"{part}.loaded"
    slot = Slot.create(path, part_length(committed, part))
    path.unlink()
    with slot:
        meta = load_part(storage, series, committed, part, slot, patience=IMPATIENT)
        return {file.name: bytes(slot.file(file.name)) for file in meta.files}


def _shape() -> Shape:
    return Shape(2, True)
