# SPDX-License-Identifier: Apache-2.0
"""A slot: a file in shared memory that holds one part of one version.

    [0, 4096)                   the header: state, version, lengths, checksums
    [4096, 4096 + length)       the data: the part's files, each at a multiple of 4096
    [4096 + length, ...)        the meta: which files these are, as msgpack

The image of a file in a slot is, byte for byte, the file on storage. The header says *writing*
before the first byte of data changes and *sealed* after the last one, and it carries a checksum of
itself. So a process that dies at any moment leaves a slot that is whole, or one that is not taken
for whole.
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec
from crc32c import crc32c
from msgspec import Struct

from holdfast.checkpoint.memory import address_of
from holdfast.model.checkpoint import NONE, FileEntry, Shape, Version
from holdfast.model.errors import RejectedError, StateError

HEADER = 4096
"""Where the data begins."""
META_MAX = 64 * 1024
"""Room behind the data for the meta."""

_ALIGNMENT = 4096  # So that the files can be written with O_DIRECT straight out of the mapping.
_MAGIC = b"HFSLOT1\0"
_WRITING, _SEALED = 1, 2
_FIELDS = struct.Struct("<8sIqqQQIQ")
_CHECKSUM = struct.Struct("<I")


def align(length: int) -> int:
    """The next multiple of 4096."""
    return (length + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


class SlotFile(Struct, frozen=True, array_like=True):
    """Where a file of the part stands."""

    name: str
    offset: int
    """From the begin of the data; a multiple of 4096."""
    length: int


class SlotMeta(Struct, frozen=True, array_like=True):
    """What a sealed slot holds."""

    directory: str
    part: str
    version: Version
    shape: Shape
    files: tuple[SlotFile, ...]
    contributions: tuple[FileEntry, ...] = ()
    """For parity: name, image length and digest of every part that was added in."""

    @property
    def data_length(self) -> int:
        """Bytes of data, the zeros after the last file included."""
        return max((align(file.offset + file.length) for file in self.files), default=0)


def lay_out(files: Iterable[tuple[str, int]]) -> tuple[tuple[SlotFile, ...], int]:
    """Places for files of these names and lengths, and the length of the data as a whole."""
    placed = []
    end = 0
    for name, length in files:
        placed.append(SlotFile(name, end, length))
        end = align(end + length)
    return tuple(placed), end


def file_size(data_length: int) -> int:
    """How large a slot's file must be for this much data."""
    return HEADER + align(data_length) + META_MAX


class _Header(Struct, frozen=True):
    state: int
    version: Version
    data_length: int
    meta_length: int
    meta_crc: int
    layout: int

    def pack(self) -> bytes:
        fields = _FIELDS.pack(
            _MAGIC,
            self.state,
            self.version.lineage,
            self.version.step,
            self.data_length,
            self.meta_length,
            self.meta_crc,
            self.layout,
        )
        return fields + _CHECKSUM.pack(crc32c(fields))

    @classmethod
    def unpack(cls, image: bytes) -> "_Header | None":
        """None when the bytes are not a whole header."""
        fields = image[: _FIELDS.size]
        magic, state, lineage, step, data, meta, meta_crc, layout = _FIELDS.unpack(fields)
        (checksum,) = _CHECKSUM.unpack_from(image, _FIELDS.size)
        if magic != _MAGIC or checksum != crc32c(fields):
            return None
        return cls(state, Version(lineage, step), data, meta, meta_crc, layout)


_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Slot:
    """A slot file, mapped into this process."""

    def __init__(self, path: Path, mapping: mmap.mmap, *, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self._map = mapping
        self._whole = memoryview(mapping)
        self.address = address_of(self._whole) + HEADER
        """The address of the first byte of data, for callers that copy by address."""
        self.data = self._whole[HEADER:]
        """Everything behind the header: room for the data and, behind that, the meta."""
        self._handed_out: list[memoryview] = []
        self._meta: SlotMeta | None = None

    @classmethod
    def open(cls, path: str | Path, writable: bool) -> "Slot":
        """Map an existing slot file; StateError if it is gone or cannot be a slot."""
        place = Path(path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(place, flags)
        except FileNotFoundError:
            raise StateError(f"the memory slot {place} is gone") from None
        except OSError as exc:
            if exc.errno != errno.ELOOP:
                raise
            raise StateError(f"the memory slot {place} is a link") from exc
        try:
            return cls._mapped(place, fd, writable)
        finally:
            os.close(fd)

    @classmethod
    def create(cls, path: str | Path, data_length: int) -> "Slot":
        """A new slot with room for this much data, readable by this user only."""
        place = Path(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(place, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, file_size(data_length))
            return cls._mapped(place, fd, True)
        except OSError:
            os.unlink(place)
            raise
        finally:
            os.close(fd)

    @classmethod
    def _mapped(cls, place: Path, fd: int, writable: bool) -> "Slot":
        size = os.fstat(fd).st_size
        if size < HEADER + META_MAX:
            raise StateError(f"the memory slot {place} has {size} bytes, which is too short")
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return cls(place, mmap.mmap(fd, size, mmap.MAP_SHARED, access), writable=writable)

    def __enter__(self) -> "Slot":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def capacity(self) -> int:
        """How much data the slot has room for."""
        return len(self.data) - META_MAX

    @property
    def version(self) -> Version:
        """The version that is sealed here, by the header; NONE when nothing is. Cheap: no meta is
        read.

        A reader that did not pin the slot asks before and after, to know that nothing was written.
        """
        header = self._header()
        return header.version if header is not None and header.state == _SEALED else NONE

    def begin(self, version: Version) -> None:
        """Make the slot invalid until `seal`. To be called before any data changes."""
        self._meta = None
        self._write_header(_Header(_WRITING, version, 0, 0, 0, 0))

    def pad(self, files: Iterable[SlotFile]) -> None:
        """Put zeros behind each file: so equal files give equal data, whatever the slot held
        before."""
        for file in files:
            end = file.offset + file.length
            self.data[end : align(end)] = bytes(align(end) - end)

    def seal(self, meta: SlotMeta) -> None:
        """All data is in its place: write the meta, and then mark the slot as sealed in the
        header."""
        header = self._header()
        if header is None or (header.state, header.version) != (_WRITING, meta.version):
            raise StateError(
                f"the memory slot {self.path} cannot be sealed as step {meta.version.step}: "
                f"no write of that step was begun"
            )
        length = meta.data_length
        if length > self.capacity:
            raise RejectedError(
                f"the part {meta.part} has {length} bytes, but its memory slot {self.path} "
                f"has room for {self.capacity}"
            )
        packed = msgspec.msgpack.encode(meta)
        if len(packed) > META_MAX:
            raise RejectedError(
                f"the list of the {len(meta.files)} files of part {meta.part} takes {len(packed)} "
                f"bytes; at most {META_MAX} are possible"
            )
        self.pad(meta.files)
        self.data[length : length + len(packed)] = packed
        layout = layout_id(meta.files)
        self._write_header(
            _Header(_SEALED, meta.version, length, len(packed), crc32c(packed), layout)
        )
        self._meta = meta

    def read(self) -> SlotMeta | None:
        """What is sealed here; None when it is not sealed or not whole."""
        self._meta = self._checked()
        return self._meta

    def _checked(self) -> SlotMeta | None:
        header = self._header()
        if header is None or header.state != _SEALED:
            return None
        if header.data_length > self.capacity or header.meta_length > META_MAX:
            return None
        end = header.data_length + header.meta_length
        packed = bytes(self.data[header.data_length : end])
        if crc32c(packed) != header.meta_crc:
            return None
        try:
            meta = msgspec.msgpack.decode(packed, type=SlotMeta)
        except msgspec.MsgspecError:
            return None
        agrees = (
            meta.version == header.version
            and layout_id(meta.files) == header.layout
            and lay_out((file.name, file.length) for file in meta.files)
            == (meta.files, header.data_length)
        )
        return meta if agrees else None

    def file(self, name: str) -> memoryview:
        """The bytes of one file of what is sealed here, read only. Released by `close`."""
        meta = self._meta or self.read()
        if meta is None:
            raise StateError(f"the memory slot {self.path} is not sealed")
        for file in meta.files:
            if file.name == name:
                view = self.data[file.offset : file.offset + file.length].toreadonly()
                self._handed_out.append(view)
                return view
        raise StateError(f"there is no file {name} in part {meta.part} in {self.path}")

    def image(self) -> memoryview:
        """Data and meta of what is sealed here: all that another slot needs. See `seal_image`."""
        header = self._header()
        if header is None or header.state != _SEALED:
            raise StateError(f"the memory slot {self.path} is not sealed")
        view = self.data[: header.data_length + header.meta_length]
        self._handed_out.append(view)
        return view

    def seal_image(self, data_length: int, total: int) -> SlotMeta:
        """Seal a slot whose data begins with another slot's whole image; StateError if it is none.

        `total` is the length of the image, of which the first `data_length` bytes are data.
        """
        packed = bytes(self.data[data_length:total])
        try:
            meta = msgspec.msgpack.decode(packed, type=SlotMeta)
        except msgspec.MsgspecError as exc:
            raise StateError(f"what came for {self.path} does not end with a meta: {exc}") from exc
        if meta.data_length != data_length:
            raise StateError(
                f"what came for {self.path} has {data_length} bytes of data; "
                f"its meta says {meta.data_length}"
            )
        self.seal(meta)
        return meta

    def close(self) -> None:
        """Unmap. StateError when a view is still in use: its memory would vanish under it."""
        self.release_views()
        try:
            self.data.release()
            self._whole.release()
            self._map.close()
        except BufferError:
            raise self._still_in_use() from None

    def release_views(self) -> None:
        """End what `file` and `image` gave. StateError when something was made from it."""
        try:
            for view in self._handed_out:
                view.release()
        except BufferError:
            raise self._still_in_use() from None
        self._handed_out.clear()

    def _still_in_use(self) -> StateError:
        return StateError(
            f"the memory slot {self.path} cannot be unmapped: something made from its views, "
            f"a slice or a tensor, is still alive"
        )

    def _header(self) -> _Header | None:
        return _Header.unpack(bytes(self._whole[:_HEADER_BYTES]))

    def _write_header(self, header: _Header) -> None:
        self._whole[:_HEADER_BYTES] = header.pack()


def layout_id(files: Iterable[SlotFile]) -> int:
    """The same for parts whose files have the same names and lengths."""
    return crc32c(msgspec.msgpack.encode([(file.name, file.length) for file in files]))
