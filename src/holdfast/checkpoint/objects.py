# SPDX-License-Identifier: Apache-2.0
"""A store of objects (S3, GCS, ...), through whatever fsspec has a file system for.

An object appears whole when its last byte is there, and never before. There is no rename, and no
directory: a name with "/" in it is only a name.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any

import fsspec

from holdfast.checkpoint.digests import CHUNK, chunks_of, combine
from holdfast.checkpoint.storage_port import CrcOf, Moved, crc_of, readable_size, refuse_large
from holdfast.model.errors import RejectedError, RetryableError, UsageError
from holdfast.runtime.observe import wall_clock

_PIECES_MAX = 9_000
"""S3 takes 10,000 pieces per object."""

_MANY = frozenset("*?[")

_FOREIGN_ERRORS = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
)
"""What the libraries below fsspec raise beside OSError, if the server does not answer or
refuses."""


class ObjectStorage:
    """A prefix of a store of objects."""

    can_rename = False

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            # Other nodes write here too: a listing from a minute ago is worth nothing.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as exc:
            raise UsageError(f"the storage {url} cannot be used: {exc}") from exc
        self._root = str(root).rstrip("/")

    def full(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        # Large objects go up piece by piece; one that is not finished never becomes visible.
        piece = max(CHUNK, len(data) // _PIECES_MAX + 1)
        crcs = []
        with self._telling(path):
            file = self._fs.open(self._name(path), "wb", block_size=piece, autocommit=False)
            with ExitStack() as at_the_end:
                # Whatever ends this early: closing the file would give the object its name.
                at_the_end.callback(file.discard)
                with file:
                    for offset, size in chunks_of(len(data)):
                        with data[offset : offset + size] as view:
                            crcs.append(crc_of(offset, view))
                            file.write(view)
                        moved(size)
                at_the_end.pop_all()
            file.commit()
        self._check_size(path, len(data))
        return combine(crcs)

    def put(self, path: str, content: bytes) -> None:
        with self._telling(path):
            self._fs.pipe_file(self._name(path), content)
        self._check_size(path, len(content))

    def get(self, path: str) -> bytes | None:
        with self._telling(path):
            try:
                # Asked for first, as S3 refuses to give any part of an empty object.
                refuse_large(self.full(path), self._fs.size(self._name(path)))
                return bytes(self._fs.cat_file(self._name(path)))
            except FileNotFoundError:
                return None

    def open(self, path: str) -> "ObjectReader":
        return ObjectReader(self, path, self._size(path))

    def files(self, path: str) -> dict[str, int]:
        top = self._name(path)
        with self._telling(path):
            found = self._fs.find(top, detail=True)
        return {
            name.removeprefix(top).strip("/"): int(info["size"])
            for name, info in found.items()
            if name.startswith(f"{top}/") and info["type"] == "file"
        }

    def folders(self, path: str) -> list[str]:
        return sorted(
            _last(info["name"])
            for info in self._listed(path)
            if info["type"] == "directory" and not _last(info["name"]).startswith(".")
        )

    def entries(self, path: str) -> dict[str, float]:
        now = wall_clock()
        return {_last(info["name"]): now - _changed(info, now) for info in self._listed(path)}

    def sync(self, path: str) -> None:
        """Objects are durable when they are there."""

    def rename(self, source: str, target: str) -> None:
        raise NotImplementedError("objects have no rename")

    def exchange(self, one: str, other: str) -> bool:
        return False

    def remove(self, path: str) -> None:
        name = self._name(path)
        if not _MANY.isdisjoint(path):
            # It would be taken for all names that look like this.
            raise RejectedError(f"{self.full(path)} is not removed: no name of ours is like this")
        with self._telling(path):
            try:
                self._fs.rm(name, recursive=True)
            except FileNotFoundError:
                return

    def free_bytes(self) -> int | None:
        return None

    def read_range(self, path: str, offset: int, size: int) -> bytes:
        """Some bytes of an object; fewer if it ends before."""
        with self._telling(path):
            return bytes(self._fs.cat_file(self._name(path), start=offset, end=offset + size))

    def _name(self, path: str) -> str:
        if not {".", ".."}.isdisjoint(path.split("/")):
            raise RejectedError(f"{self.full(path)} would lead out of {self.url}")
        return f"{self._root}/{path}".rstrip("/")

    def _size(self, path: str) -> int:
        with self._telling(path):
            return int(self._fs.info(self._name(path))["size"])

    def _listed(self, path: str) -> list[dict[str, Any]]:
        with self._telling(path):
            try:
                listed: list[dict[str, Any]] = self._fs.ls(self._name(path), detail=True)
            except FileNotFoundError:
                return []
        return [info for info in listed if info["name"].rstrip("/") != self._name(path)]

    def _check_size(self, path: str, size: int) -> None:
        found = self._size(path)
        if found != size:
            raise RetryableError(
                f"{self.full(path)} has {found} bytes after {size} were written to it"
            )

    @contextmanager
    def _telling(self, path: str) -> Iterator[None]:
        """Turn what foreign libraries raise into our kinds of errors."""
        try:
            yield
        except PermissionError as exc:
            raise RejectedError(f"{self.full(path)} is not accessible: {exc}") from exc
        except _foreign_errors() as exc:
            raise RetryableError(f"{self.full(path)}: {exc}") from exc


class ObjectReader:
    """An object, read in ranges."""

    def __init__(self, storage: ObjectStorage, path: str, size: int) -> None:
        self.size = size
        self._storage = storage
        self._path = path

    def read_into(self, offset: int, target: memoryview) -> None:
        if not target:
            return  # No server has a range of no bytes.
        content = self._storage.read_range(self._path, offset, len(target))
        if len(content) != len(target):
            end = readable_size(offset + len(content))
            name = self._storage.full(self._path)
            raise RetryableError(f"{name} ends after {end}, sooner than said")
        target[:] = content

    def close(self) -> None:
        """Nothing is held between two reads."""


def _foreign_errors() -> tuple[type[BaseException], ...]:
    loaded = ((sys.modules.get(module), name) for module, name in _FOREIGN_ERRORS)
    found = (getattr(module, name, None) for module, name in loaded if module is not None)
    return tuple(kind for kind in found if isinstance(kind, type))


def _last(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def _changed(info: dict[str, Any], now: float) -> float:
    """When it changed last; now, if the store does not tell: then it does not count as a
    leftover."""
    for key in ("LastModified", "mtime", "created", "last_modified", "updated"):
        match info.get(key):
            case datetime() as moment:
                return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            case int() | float() as seconds:
                return float(seconds)
    return now
