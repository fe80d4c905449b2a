# SPDX-License-Identifier: Apache-2.0
"""The manifest: what makes a directory a checkpoint. Specified in docs/checkpoint-format.md.

It names every file of the checkpoint with its size and digest, and it ends with a checksum of
itself. A directory is a committed checkpoint if and only if a whole manifest is in it.
"""

import re
import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
from crc32c import crc32c
from msgspec import Struct

from holdfast.checkpoint.data_position import DataPosition
from holdfast.checkpoint.digests import CHUNK
from holdfast.checkpoint.storage_port import Patience, Storage, persistently, telling
from holdfast.model.checkpoint import (
    SHARED,
    FileEntry,
    Series,
    Shape,
    Stored,
    Version,
    filled,
    rank_of,
)
from holdfast.model.errors import RejectedError, RetryableError, StateError
from holdfast.protocol.checkpoints import CommitOrder

MANIFEST = "manifest.json"
FORMAT = "holdfast-checkpoint"
FORMAT_VERSION = 1
AGAIN = "~"
"""Stands between a checkpoint's name and an attempt, where the plain name is not free."""

NUMBER_MAX = 2**63 - 1
"""The limit of every number in a manifest: in memory and between nodes numbers have 64 bits."""
RANKS_MAX = 1 << 20
NAME_BYTES_MAX = 200
"""The limit of each piece of a name: it leaves room for what is added while the file is written."""
PIECES_MAX = 20

_PATIENCE = Patience(limit_s=1.0, first_pause_s=0.2)
"""For single manifests that cannot be read while others can. It is short, because training may wait
for the list."""

_END = b'"\n}\n'
_DIGEST = re.compile(r"[0-9a-f]{8}")
_RANK = re.compile(r"rank-([0-9]{5,7})")
_CREATED = re.compile(r"[0-9TZ:.+-]{1,40}")
_NOT_IN_NAMES = frozenset("/\\*?[]{}")
"""Characters that would lead elsewhere, or mean many names at once to a store of objects."""


class ManifestFile(Struct, frozen=True):
    """One file; its digest as eight hexadecimal digits."""

    name: str
    size: int
    digest: str
    part: str


class Manifest(Struct, frozen=True, omit_defaults=True):
    """What is in a checkpoint, and which attempt wrote it."""

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
    """How far those datasets were that go with the checkpoints of this directory."""

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
    """The manifest of a checkpoint that is complete on storage.

    RejectedError if readers would not believe it.
    """
    manifest = Manifest(
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
    wrong = _what_is_wrong(manifest)
    if wrong:
        raise RejectedError(f"step {order.version.step} cannot be committed: it has {wrong}")
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """JSON for people too, with the checksum as its last field."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    head = body.removesuffix(b"\n}") + b',\n "checksum": "'
    return head + f"{crc32c(head):08x}".encode() + _END


def decode_manifest(raw: bytes, where: str) -> Manifest:
    """The manifest of these bytes; StateError if they are not, or no longer, a whole manifest.

    The checksum finds damage, not intent: everything that later code relies on is checked here.
    """
    tail = len(_END) + 8
    head, digits, end = raw[:-tail], raw[-tail : -len(_END)], raw[-len(_END) :]
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
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
    wrong = _what_is_wrong(manifest)
    if wrong:
        raise StateError(f"{where} is not to be believed: it has {wrong}")
    return manifest


def _what_is_wrong(manifest: Manifest) -> str:
    """The first impossible value in a manifest; empty if all can be believed."""
    numbers = {
        "format_version": manifest.format_version,
        "step": manifest.step,
        "lineage": manifest.lineage,
        "world_size": manifest.world_size,
    }
    for field, number in numbers.items():
        if not 0 <= number <= NUMBER_MAX:
            return f"the {field} {number}"
    if not 1 <= manifest.world_size <= RANKS_MAX:
        return f"{manifest.world_size} ranks"
    if manifest.chunk != CHUNK:
        return f"digests over chunks of {manifest.chunk} bytes instead of {CHUNK}"
    if not is_plain_name(manifest.attempt) or AGAIN in manifest.attempt or "@" in manifest.attempt:
        return f"the attempt {_cut(manifest.attempt)}"
    if not _CREATED.fullmatch(manifest.created):
        return f"the time {_cut(manifest.created)}"
    return (
        wrong_names(manifest.pattern, manifest.tracker, manifest.tracker_text)
        or _wrong_files(manifest)
        or next((wrong for position in manifest.data if (wrong := position.wrong())), "")
    )


def wrong_names(pattern: str, tracker: str, tracker_text: str) -> str:
    """What is wrong with the names of a series; empty if nothing is."""
    name = filled(pattern, step=NUMBER_MAX, name="{")
    if not is_plain_name(name) or AGAIN in name:
        return f"the pattern {_cut(pattern)} for names of directories"
    if tracker and not is_plain_name(tracker):
        return f"the tracker {_cut(tracker)}"
    text = filled(tracker_text, step=0, name="x")
    is_text = text.replace("\n", "").isprintable() and {"{", "}"}.isdisjoint(text)
    is_constant = text == filled(tracker_text, step=1, name="y")
    if not is_text or len(text) > NAME_BYTES_MAX or (tracker and is_constant):
        return f"the text {_cut(tracker_text)} for its tracker"
    return ""


def _wrong_files(manifest: Manifest) -> str:
    names: set[str] = set()
    for file in manifest.files:
        if not is_safe_name(file.name):
            return f"a file {_cut(file.name)}, which is not inside it"
        if file.name in names:
            return f"two files {_cut(file.name)}"
        names.add(file.name)
        if not 0 <= file.size <= NUMBER_MAX:
            return f"a file of {file.size} bytes"
        if not _DIGEST.fullmatch(file.digest):
            return f"the digest {_cut(file.digest)}"
        rank = _RANK.fullmatch(file.part)
        if not (
            int(rank[1]) < manifest.world_size if rank else file.part == SHARED and manifest.shared
        ):
            return f"a file of part {_cut(file.part)}"
    return ""


def is_safe_name(name: str) -> bool:
    """Whether a file of this name is inside the checkpoint's directory and not its manifest."""
    pieces = name.split("/")
    return (
        pieces[0] != MANIFEST
        and len(pieces) <= PIECES_MAX
        and name.isprintable()
        and all(piece not in {"", ".", ".."} and _is_short(piece) for piece in pieces)
    )


def is_plain_name(name: str) -> bool:
    """Whether an entry right below the directory may have this name, and is found again by it."""
    is_ordinary = name.isprintable() and _NOT_IN_NAMES.isdisjoint(name)
    return bool(name) and is_ordinary and not name.startswith(".") and _is_short(name)


def _is_short(name: str) -> bool:
    return len(name.encode()) <= NAME_BYTES_MAX


def _cut(text: str) -> str:
    """Foreign text, harmless for a terminal and not too long."""
    return ascii(text if len(text) <= 60 else f"{text[:60]}...")


class Committed(Struct, frozen=True):
    """A checkpoint on storage."""

    name: str
    """Of its directory."""
    manifest: Manifest

    def series(self, directory: str) -> Series:
        """The series that it belongs to, as far as names go: for programs that only have the
        files."""
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
        first_rank = 0
        if manifest.shared:
            parts = {file.part for file in manifest.files} - {SHARED}
            first_rank = min(map(rank_of, parts), default=manifest.world_size)
        return Stored(manifest.version, manifest.shape, positions, first_rank)


class Unread(Struct, frozen=True):
    """A directory that has a checkpoint's name and cannot be read now: it may be a checkpoint."""

    name: str
    step: int
    """The step that its name gives."""
    why: str


class Listing(Struct, frozen=True):
    """What there is in a directory."""

    committed: list[Committed]
    """The newest first; also several of one step."""
    unread: list[Unread]

    def perhaps_newest(self) -> list[Unread]:
        """Those that may be newer than all that could be read."""
        step = self.committed[0].manifest.step if self.committed else 0
        return [one for one in self.unread if one.step >= step]


def read_manifest(storage: Storage, name: str) -> Manifest | None:
    """The manifest in a checkpoint's directory; None if there is none, StateError if it is bad."""
    path = f"{name}/{MANIFEST}"
    with telling(f"{storage.full(path)} could not be read"):
        raw = storage.get(path)
    if raw is None:
        return None
    if not name.isprintable():
        raise StateError(f"{storage.url} has a manifest in {_cut(name)}, which is no name of ours")
    return decode_manifest(raw, storage.full(path))


def list_committed(
    storage: Storage, series: Series | None = None, report: Callable[[str], None] | None = None
) -> list[Committed]:
    """Every committed checkpoint, the newest first; one per step.

    Without a series, checkpoints of any name. Directories that are not Holdfast's are passed over;
    one that looks like Holdfast's and cannot be read is reported. RejectedError if a series has no
    others: to begin from nothing then would be a disaster.
    """
    listing = list_all(storage, series, report)
    if series is not None and listing.unread and not listing.committed:
        raise RejectedError(
            f"{listing.unread[0].why}: make it readable, or remove it if it is no checkpoint"
        )
    return newest_per_step(listing.committed)


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
) -> Listing:
    """Every committed checkpoint, and what may be one and cannot be read.

    `known` is filled with the manifests that never change while they exist; those in it are not
    read again. RetryableError when the storage as a whole does not work.
    """
    known = {} if known is None else known
    found: list[Committed] = []
    failed: dict[str, RejectedError | RetryableError] = {}

    def look(name: str) -> None:
        failed.pop(name, None)
        try:
            manifest = known.get(name) or read_manifest(storage, name)
        except StateError as exc:
            if report is not None:
                report(str(exc))
            return
        except (RejectedError, RetryableError) as exc:
            failed[name] = exc
            return
        if manifest is None:
            return
        if not storage.can_rename and AGAIN in name:
            known[name] = manifest  # A name that only one attempt ever uses.
        if _fits(name, manifest, series):
            found.append(Committed(name, manifest))

    with telling(f"{storage.url} could not be listed"):
        names = storage.folders("")
    for name in names:
        # Directories with other names are not even looked at: they may belong to another user.
        if series is None or _step_of(name, series) is not None:
            look(name)
    _look_again(failed, look)
    if passing := _passing(failed):
        # One bad manifest hides no others; but if none can be read any more, the storage has
        # failed.
        if found:
            with suppress(StateError):
                read_manifest(storage, found[-1].name)
        elif series is not None:
            raise passing[0]
    found.sort(key=lambda one: _age_key(one.manifest), reverse=True)
    unread = _unread(failed, found, series)
    for one in unread:
        if report is not None:
            report(one.why)
    return Listing(found, unread)


def _passing(failed: dict[str, RejectedError | RetryableError]) -> list[RetryableError]:
    return [exc for exc in failed.values() if isinstance(exc, RetryableError)]


def _look_again(
    failed: dict[str, RejectedError | RetryableError], look: Callable[[str], None]
) -> None:
    """Try once more, for a moment, to read what failed for reasons that may pass."""

    def again() -> None:
        for name in [name for name, exc in failed.items() if isinstance(exc, RetryableError)]:
            look(name)
        if passing := _passing(failed):
            raise passing[0]

    with suppress(RetryableError):
        persistently("", again, _PATIENCE, threading.Event())


def _unread(
    failed: dict[str, RejectedError | RetryableError],
    found: list[Committed],
    series: Series | None,
) -> list[Unread]:
    """What failed and has a checkpoint's name: one of the series, or one of the patterns found.

    Without any pattern, all that failed.
    """
    patterns = {one.manifest.pattern for one in found}
    kinds = [Series("", pattern=pattern) for pattern in patterns] if series is None else [series]
    unread = []
    for name, exc in failed.items():
        steps = [step for kind in kinds if (step := _step_of(name, kind)) is not None]
        if steps or not kinds:
            unread.append(Unread(name, max(steps, default=0), str(exc)))
    return unread


def _step_of(name: str, series: Series) -> int | None:
    return series.step_of(name.partition(AGAIN)[0])


def list_step(storage: Storage, name: str) -> list[Committed]:
    """Every committed checkpoint that has this name, or this name with an attempt's, the newest
    first."""
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
    return sorted(found, key=lambda one: _age_key(one.manifest), reverse=True)


def is_whole(storage: Storage, committed: Committed) -> bool:
    """Whether every file is there with its size."""
    found = storage.files(committed.name)
    return all(found.get(file.name) == file.size for file in committed.manifest.files)


def find_committed(storage: Storage, series: Series, version: Version) -> Committed:
    """The checkpoint of exactly this version; StateError when it is not there (any more)."""
    listing = list_all(storage, series)
    for committed in newest_per_step(listing.committed):
        if committed.version == version:
            return committed
    why = "".join(f": {one.why}" for one in listing.unread if one.step == version.step)
    raise StateError(
        f"there is no checkpoint of step {version.step} (lineage {version.lineage}) "
        f"in {series.directory}{why}"
    )


def _fits(name: str, manifest: Manifest, series: Series | None) -> bool:
    if series is None:
        return True
    plain = series.name(manifest.step)
    return name == plain or name.startswith(plain + AGAIN)


def _age_key(manifest: Manifest) -> tuple[Version, str]:
    return manifest.version, manifest.created
