# SPDX-License-Identifier: Apache-2.0
"""Lays a file out exactly as torch.save would write it, without touching the bytes of a tensor.

The file formats of frameworks are torch.save files: a zip archive with one pickle, which describes
the object, and one stored record per tensor storage. torch.save itself writes the archive here, but
into a sink that keeps everything except tensor bytes. Their place becomes a hole; the copy into
shared memory fills it, so that no tensor is copied twice.

One thing differs from torch.save: the CRC-32 of the storage records stays 0, as it would cost a
pass over all bytes. torch.load does not check it; `unzip -t` does and complains. The digests of the
manifest protect the bytes.
"""

import io
import pickle
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint.images import Hole, Image

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


def zip_image(name: str, value: object) -> Image:
    """The file that torch.save(value) would write, with a hole for each storage in it.

    Storages that several tensors share are stored once. The image keeps them alive.
    """
    sink = _Sink()
    storages: dict[str, torch.UntypedStorage] = {}
    try:
        with torch.serialization.skip_data():
            torch.save(value, cast("IO[bytes]", sink), pickle_module=_noting(storages))
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise UsageError(f"{name}: torch.save cannot write this object: {error}") from error
    filled = [storage for storage in storages.values() if storage.nbytes() > 0]
    if [storage.nbytes() for storage in filled] != [length for _, length in sink.skipped]:
        raise UsageError(
            f"{name}: this version of torch writes its files in a way that is not known here "
            f"({len(filled)} storages, {len(sink.skipped)} records); save it without the adapter"
        )
    holes = tuple(
        # Early: it is unknown which of these change in the next forward pass, and the version
        # counters of the tensors do not show changes to a storage.
        Hole(offset, _bytes_of(storage), label=f"{name}: storage {number}", early=True)
        for number, (storage, (offset, _)) in enumerate(zip(filled, sink.skipped, strict=True))
    )
    return Image(name, sink.length, tuple(sink.pieces), holes)


def memory_file(memory: memoryview) -> io.BufferedReader:
    """A read-only file over memory, for torch.load: reading from it gives copies."""
    return io.BufferedReader(_MemoryFile(memory))


class _MemoryFile(io.RawIOBase):
    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._memory)}
        self._position = max(0, start[whence] + offset)
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer).cast("B")
        source = self._memory[self._position : self._position + len(target)]
        target[: len(source)] = source
        self._position += len(source)
        return len(source)


class _Sink:
    """The target of torch.save: keeps what is written, and notes where bytes are left out."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.skipped: list[tuple[int, int]] = []
        self.length = 0

    def write(self, data: "ReadableBuffer") -> int:
        piece = bytes(data)
        self.pieces.append((self.length, piece))
        self.length += len(piece)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """torch leaves a storage out by seeking over it, always forward."""
        if whence != io.SEEK_CUR or offset < 0:
            raise UsageError("this version of torch writes its files in a way that is not known")
        if offset > 0:
            self.skipped.append((self.length, offset))
            self.length += offset
        return self.length

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        """Nothing to do: nothing is buffered."""


def _noting(storages: dict[str, torch.UntypedStorage]) -> Any:
    """A pickle module for torch.save that also notes each storage under the name of its record.

    torch derives its pickler from the module's Pickler and gives it a `persistent_id` that names a
    storage's record. Only that place knows both.
    """

    class Noting(pickle.Pickler):
        def __init_subclass__(cls, **arguments: Any) -> None:
            super().__init_subclass__(**arguments)
            identify = cls.persistent_id

            def persistent_id(self: pickle.Pickler, value: Any) -> Any:
                identity = identify(self, value)
                if identity is not None:
                    storages[identity[2]] = _untyped(value)
                return identity

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return SimpleNamespace(__name__="pickle", Pickler=Noting)


def _untyped(storage: Any) -> torch.UntypedStorage:
    if isinstance(storage, torch.storage.TypedStorage):
        return storage._untyped_storage  # The result of untyped(), without its warning.
    assert isinstance(storage, torch.UntypedStorage)
    return storage


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
