# SPDX-License-Identifier: Apache-2.0
"""The manifest: what makes a directory a checkpoint. Specified in docs/checkpoint-format.md.

It names every file of the checkpoint with its size and digest, and it ends with a checksum of
itself. A directory is a committed checkpoint if and only if a whole manifest is in it.
"""

from collections.abc import Callable

import msgspec
from crc32c import crc32c
from msgspec import Struct

from holdfast.checkpoint.data_position import DataPosition
from holdfast.checkpoint.digests import CHUNK
from holdfast.checkpoint.storage_port import Storage, telling
from holdfast.model.checkpoint import FileEntry, Series, Shape, Stored, Version
from holdfast.model.errors import StateError
from holdfast.protocol.checkpoints import CommitOrder

MANIFEST = "manifest.json"
FORMAT = "holdfast-checkpoint"
FORMAT_VERSION = 1
AGAIN = "~"
"""Stands between a checkpoint's name and an attempt, where the plain name is not to be had."""

_END = b'"\n}\n'


class ManifestFile(Struct, frozen=True):
    """One file; its digest as eight hexadecimal digits."""

    name: str
    size: int
    digest: str
    part: str


class Manifest(Struct, frozen=True, omit_defaults=True):
    """What is in a checkpoint, and who wrote it."""

    format: str
    format_version: int
    step: int
    lineage: int
    world_size: int
    shared: bool
    attempt: str
    created: str
    pattern: str
    tracker: str
    tracker_text: str
    chunk: int
    files: tuple[ManifestFile, ...]
    data: tuple[DataPosition, ...] = ()
    """How far the datasets were that are read with respect to the directory."""

    @property
    def version(self) -> Version:
        return Version(self.lineage, self.step)

    @property
    def shape(self) -> Shape:
        return Shape(self.world_size, self.shared)

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """The files as the rest of the program knows them."""
        return tuple(
            FileEntry(file.name, file.size, int(file.digest, 16), file.part) for file in self.files
        )

    @property
    def size(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files)

    def files_of(self, part: str) -> tuple[FileEntry, ...]:
        """The files of one part, in the order in which they stand in a slot."""
        return tuple(entry for entry in self.entries if entry.part == part)


def make_manifest(series: Series, order: CommitOrder, created: str) -> Manifest:
    """The manifest of a checkpoint that is complete on storage."""
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        step=order.version.step,
        lineage=order.version.lineage,
        world_size=order.shape.world_size,
        shared=order.shape.shared,
        attempt=order.attempt,
        created=created,
        pattern=series.pattern,
        tracker=series.tracker,
        tracker_text=series.tracker_text,
        chunk=CHUNK,
        files=tuple(
            ManifestFile(entry.name, entry.size, f"{entry.digest:08x}", entry.part)
            for entry in order.files
        ),
        data=tuple(DataPosition.of(position) for position in order.positions),
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON for people too, with the checksum as its last field."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    head = body.removesuffix(b"\n}") + b',\n "checksum": "'
    return head + f"{crc32c(head):08x}".encode() + _END


def decode_manifest(raw: bytes, where: str) -> Manifest:
    """The manifest of these bytes; StateError when they are not, or no longer, a whole one."""
    tail = len(_END) + 8
    head, digits, end = raw[:-tail], raw[-tail : -len(_END)], raw[-len(_END) :]
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise StateError(f"{where} is not a manifest: {exc}") from exc
    if manifest.format != FORMAT:
        raise StateError(f"{where} is not a manifest of Holdfast")
    if manifest.format_version > FORMAT_VERSION:
        # Before the checksum: a newer format may have it elsewhere.
        raise StateError(
            f"{where} has format version {manifest.format_version}; this Holdfast reads up to "
            f"{FORMAT_VERSION}: use a newer one"
        )
    if end != _END or digits != f"{crc32c(head):08x}".encode():
        raise StateError(f"{where} is damaged: its checksum does not fit its content")
    for file in manifest.files:
        if not is_safe_name(file.name):
            raise StateError(f"{where} names the file {file.name!r}, which is not inside it")
    return manifest


def is_safe_name(name: str) -> bool:
    """Whether a file of this name is inside the checkpoint's directory and not its manifest."""
    pieces = name.split("/")
    return name != MANIFEST and all(piece not in {"", ".", ".."} for piece in pieces)


class Committed(Struct, frozen=True):
    """A checkpoint on storage."""

    name: str
    """Of its directory."""
    manifest: Manifest

    def series(self, directory: str) -> Series:
        """The series that it belongs to, as far as names go: for those who only have the files."""
        manifest = self.manifest
        return Series(
            directory,
            pattern=manifest.pattern,
            tracker=manifest.tracker,
            tracker_text=manifest.tracker_text,
        )

    @property
    def version(self) -> Version:
        return self.manifest.version

    @property
    def stored(self) -> Stored:
        """What the ledger wants to know of it."""
        manifest = self.manifest
        positions = tuple(entry.position() for entry in manifest.data)
        return Stored(manifest.version, manifest.shape, positions)


def read_manifest(storage: Storage, name: str) -> Manifest | None:
    """The manifest in a checkpoint's directory; None if there is none, StateError if it is bad."""
    path = f"{name}/{MANIFEST}"
    with telling(f"{storage.full(path)} could not be read"):
        raw = storage.get(path)
    return None if raw is None else decode_manifest(raw, storage.full(path))


def list_committed(
    storage: Storage, series: Series | None = None, report: Callable[[str], None] | None = None
) -> list[Committed]:
    """Every committed checkpoint, the newest first; one per step.

    Without a series, checkpoints of any name. What is none of ours is passed over; what looks like
    ours and cannot be read is reported.
    """
    return newest_per_step(list_all(storage, series, report))


def newest_per_step(found: list[Committed]) -> list[Committed]:
    """Without those that a newer one of the same step has replaced; the newest comes first."""
    newest: dict[int, Committed] = {}
    for one in found:
        newest.setdefault(one.manifest.step, one)
    return list(newest.values())


def list_all(
    storage: Storage,
    series: Series | None = None,
    report: Callable[[str], None] | None = None,
    known: dict[str, Manifest] | None = None,
) -> list[Committed]:
    """Every committed checkpoint, the newest first; also several of one step.

    `known` is filled with the manifests that stay what they are for as long as they are there; what
    is in it is not read again.
    """
    known = {} if known is None else known
    found = []
    with telling(f"{storage.url} could not be listed"):
        names = storage.folders("")
    for name in names:
        try:
            manifest = known.get(name) or read_manifest(storage, name)
        except StateError as exc:
            if report is not None:
                report(str(exc))
            continue
        if manifest is None:
            continue
        if not storage.can_rename and AGAIN in name:
            known[name] = manifest  # A name that only one attempt ever uses.
        if _fits(name, manifest, series):
            found.append(Committed(name, manifest))
    return sorted(found, key=lambda one: _age_key(one.manifest), reverse=True)


def list_step(storage: Storage, name: str) -> list[Committed]:
    """Every committed checkpoint that has this name, or this name with an attempt's."""
    found = []
    for folder in storage.folders(""):
        if folder != name and not folder.startswith(name + AGAIN):
            continue
        try:
            manifest = read_manifest(storage, folder)
        except StateError:
            continue
        if manifest is not None:
            found.append(Committed(folder, manifest))
    return found


def is_whole(storage: Storage, committed: Committed) -> bool:
    """Whether every file is there with its size."""
    found = storage.files(committed.name)
    return all(found.get(file.name) == file.size for file in committed.manifest.files)


def find_committed(storage: Storage, series: Series, version: Version) -> Committed:
    """The checkpoint of exactly this version; StateError when it is not there (any more)."""
    for committed in list_committed(storage, series):
        if committed.version == version:
            return committed
    raise StateError(
        f"there is no checkpoint of step {version.step} (lineage {version.lineage}) "
        f"in {series.directory}"
    )


def _fits(name: str, manifest: Manifest, series: Series | None) -> bool:
    if series is None:
        return True
    plain = series.name(manifest.step)
    return name == plain or name.startswith(plain + AGAIN)


def _age_key(manifest: Manifest) -> tuple[Version, str]:
    return manifest.version, manifest.created
