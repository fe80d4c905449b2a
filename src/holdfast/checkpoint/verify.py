# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a checkpoint is whole: at a glance (names and sizes) or by every byte."""

import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from crc32c import crc32c
from msgspec import Struct

from holdfast.checkpoint.commit import tracker_text
from holdfast.checkpoint.digests import CHUNK, chunks_of, combine
from holdfast.checkpoint.manifest import MANIFEST, Committed, encode_manifest, list_all
from holdfast.checkpoint.persist import READERS, damaged, digest_file, wrong_size
from holdfast.checkpoint.storage_port import Storage, telling
from holdfast.model.checkpoint import FileEntry, Series
from holdfast.model.errors import RejectedError, RetryableError, StateError


class Verdict(Struct, frozen=True):
    """What is wrong with a checkpoint."""

    name: str
    step: int
    problems: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return not self.problems


def quick_problems(storage: Storage, committed: Committed) -> list[str]:
    """Files that are missing, have another size, or are not in the manifest."""
    try:
        with telling(f"{storage.full(committed.name)} could not be listed"):
            found = storage.files(committed.name)
    except (RejectedError, RetryableError) as exc:
        return [str(exc)]  # Other checkpoints may be well all the same.
    found.pop(MANIFEST, None)
    problems = []
    for file in committed.manifest.files:
        path = storage.full(f"{committed.name}/{file.name}")
        size = found.pop(file.name, None)
        if size is None:
            problems.append(f"{path} is missing")
        elif size != file.size:
            problems.append(wrong_size(path, file.size, size))
    for name in sorted(found):
        path = storage.full(f"{committed.name}/{name}")
        problems.append(f"{_shown(path)} is not in the manifest")
    return problems


def _shown(path: str) -> str:
    """A name that other programs chose, made harmless for a terminal."""
    return path if path.isprintable() else ascii(path)


def verify_checkpoint(
    storage: Storage,
    committed: Committed,
    progress: Callable[[int], None] = lambda size: None,
) -> Verdict:
    """Read every byte and compare its digest. `progress` gets the number of bytes just read."""
    problems = quick_problems(storage, committed)
    try:
        found = storage.files(committed.name)
    except (OSError, RejectedError, RetryableError):
        found = {}
    scratch = _Scratch()
    for entry in committed.manifest.entries:
        if found.get(entry.name) != entry.size:
            continue  # Reported already.
        path = f"{committed.name}/{entry.name}"
        try:
            with telling(f"{storage.full(path)} could not be read"):
                digest = digest_file(storage, path, entry.size, scratch, READERS, progress)
        except (StateError, RejectedError, RetryableError) as exc:
            problems.append(str(exc))
            continue
        if digest != entry.digest:
            problems.append(damaged(storage.full(path), entry.digest, digest))
    return Verdict(committed.name, committed.manifest.step, tuple(problems))


def directory_problems(storage: Storage) -> list[str]:
    """What is wrong beside the checkpoints: manifests that are bad or gone, the tracker."""
    problems: list[str] = []
    listing = list_all(storage, report=problems.append)
    if not listing.committed:
        return problems
    newest = listing.committed[0]
    series = newest.series(storage.url)
    unread = {one.name for one in listing.unread}
    for name in storage.folders(""):
        if name in unread or series.step_of(name) is None:
            continue
        if _small_file(storage, f"{name}/{MANIFEST}") is None:
            problems.append(f"{storage.full(name)} has no manifest, so it is not a checkpoint")
    is_known = not listing.perhaps_newest()
    if series.tracker and is_known and not names_one_of(storage, series, [newest]):
        problems.append(
            f"{storage.full(series.tracker)} does not name the newest checkpoint, {newest.name}"
        )
    return problems


def names_one_of(storage: Storage, series: Series, committed: list[Committed]) -> bool:
    """Whether the series' tracker is there and names one of these checkpoints."""
    text = _small_file(storage, series.tracker) if series.tracker else None
    return any(text == tracker_text(series, one) for one in committed)


def _small_file(storage: Storage, path: str) -> bytes | None:
    """The content; empty if it cannot be read. A good file is never empty."""
    try:
        with telling(f"{storage.full(path)} could not be read"):
            return storage.get(path)
    except (StateError, RejectedError):
        return b""


class _Scratch:
    """Memory of one chunk per thread, on whole pages, for bytes that are only looked at."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self, offset: int, size: int) -> memoryview:
        if not hasattr(self._local, "pages"):
            self._local.pages = mmap.mmap(-1, CHUNK)
        return memoryview(self._local.pages)[:size]


def copy_checkpoint(
    storage: Storage,
    committed: Committed,
    target: Path,
    progress: Callable[[int], None] = lambda size: None,
) -> None:
    """Copy a checkpoint to a new local directory, every byte of it verified.

    The directory has its name only when all is there. StateError if the checkpoint is damaged.
    """
    if target.exists():
        raise RejectedError(f"{target} exists already")
    draft = target.with_name(f".{target.name}.partial")
    scratch = memoryview(mmap.mmap(-1, CHUNK))
    with telling(f"{storage.full(committed.name)} could not be copied to {target}"):
        shutil.rmtree(draft, ignore_errors=True)  # Of a copy that was interrupted.
        draft.mkdir(parents=True)
        try:
            for entry in committed.manifest.entries:
                _copy_file(storage, committed.name, entry, draft / entry.name, scratch, progress)
            (draft / MANIFEST).write_bytes(encode_manifest(committed.manifest))
            os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _copy_file(
    storage: Storage,
    name: str,
    entry: FileEntry,
    target: Path,
    scratch: memoryview,
    progress: Callable[[int], None],
) -> None:
    path = f"{name}/{entry.name}"
    target.parent.mkdir(parents=True, exist_ok=True)
    crcs = []
    reader = storage.open(path)
    try:
        if reader.size != entry.size:
            raise StateError(wrong_size(storage.full(path), entry.size, reader.size))
        with target.open("wb") as file:
            for offset, size in chunks_of(entry.size):
                with scratch[:size] as view:
                    reader.read_into(offset, view)
                    crcs.append(int(crc32c(view)))
                    file.write(view)
                progress(size)
            file.flush()
            os.fsync(file.fileno())
    finally:
        reader.close()
    if combine(crcs) != entry.digest:
        raise StateError(damaged(storage.full(path), entry.digest, combine(crcs)))
