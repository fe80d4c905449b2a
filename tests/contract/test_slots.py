# SPDX-License-Identifier: Apache-2.0
"""A slot is read exactly as it was sealed, or not at all; digests notice every changed byte."""

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.digests import (
    CHUNK,
    Digest,
    RunDigest,
    Sidecar,
    combine,
    digest_of,
    join,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from holdfast.checkpoint.maps import SlotMaps
from holdfast.checkpoint.slots import HEADER, META_MAX, Slot, SlotMeta, align, file_size, lay_out
from holdfast.model.checkpoint import NONE, Shape, Version
from holdfast.model.errors import RejectedError, StateError

VERSION = Version(3, 1000)
FILES = {"shared.safetensors": b"w" * 10_000, "deep/er/ä.json": b"{}", "empty": b""}


def write(slot: Slot, version: Version = VERSION, files: dict[str, bytes] = FILES) -> SlotMeta:
    placed, _ = lay_out((name, len(content)) for name, content in files.items())
    meta = SlotMeta("/ckpt", "shared", version, Shape(8, True), placed)
    slot.begin(version)
    for file in placed:
        slot.data[file.offset : file.offset + file.length] = files[file.name]
    slot.seal(meta)
    return meta


def content(slot: Slot) -> dict[str, bytes]:
    meta = slot.read()
    assert meta is not None
    return {file.name: bytes(slot.file(file.name)) for file in meta.files}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.1"


@pytest.fixture
def slot(path: Path) -> Iterator[Slot]:
    with Slot.create(path, 100_000) as created:
        yield created


def test_another_process_s_mapping_reads_what_was_sealed(slot: Slot, path: Path) -> None:
    meta = write(slot)
    with Slot.open(path, writable=False) as reader:
        assert reader.read() == meta
        assert reader.version == VERSION
        assert content(reader) == FILES


@pytest.mark.parametrize("step", [0, 1, 2**24, 2**24 + 1, 2**53 + 1, 2**63 - 1])
def test_steps_are_integers(slot: Slot, step: int) -> None:
    """The prior art keeps the step in a float32 tensor, which has no 2**24 + 1, and takes 0 for
    "nothing saved"."""
    write(slot, Version(0, step))
    meta = slot.read()
    assert meta is not None
    assert meta.version == Version(0, step) == slot.version


def test_nothing_is_read_before_it_is_sealed(slot: Slot) -> None:
    """The prior art has no mark for "being written": a half-copied state is loaded as if whole."""
    assert slot.read() is None
    write(slot)
    slot.begin(Version(3, 1001))
    assert slot.read() is None
    assert slot.version == NONE
    with pytest.raises(StateError, match="not sealed"):
        slot.file("empty")


def test_every_flipped_bit_of_header_and_meta_is_noticed(slot: Slot, path: Path) -> None:
    meta = write(slot)
    before = path.read_bytes()
    header = range(60)
    names = range(HEADER + meta.data_length, HEADER + len(slot.image()))
    assert before[60:HEADER] == bytes(HEADER - 60), "the header has grown: flip all of it"
    with path.open("r+b", buffering=0) as file:
        for position in (*header, *names):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([before[position] ^ 1 << bit]), position)
                assert slot.read() is None, f"bit {bit} of byte {position} was flipped"
            os.pwrite(file.fileno(), before[position : position + 1], position)
    assert slot.read() == meta


def test_a_header_of_another_slot_is_not_believed(slot: Slot, tmp_path: Path, path: Path) -> None:
    write(slot)
    with Slot.create(tmp_path / "other.1", 100_000) as other:
        write(other, files={"other": b"o" * 50_000})
        with path.open("r+b") as file:
            file.write((tmp_path / "other.1").read_bytes()[:HEADER])
    assert slot.read() is None


def test_sealing_needs_a_begun_write_of_the_same_version(slot: Slot) -> None:
    meta = write(slot)
    with pytest.raises(StateError, match="step 1000: no write"):
        slot.seal(meta)
    slot.begin(Version(3, 7))
    with pytest.raises(StateError, match="step 1000: no write"):
        slot.seal(meta)
    assert slot.read() is None


def test_too_much_data_is_refused_with_the_sizes(slot: Slot) -> None:
    placed, length = lay_out([("big", 200_000)])
    slot.begin(VERSION)
    with pytest.raises(
        RejectedError, match=f"shared has {length} bytes.* room for {align(100_000)}"
    ):
        slot.seal(SlotMeta("/ckpt", "shared", VERSION, Shape(1, True), placed))
    assert slot.read() is None


def test_too_many_files_are_refused(slot: Slot) -> None:
    placed, _ = lay_out((f"{n}{'x' * 200}", 0) for n in range(400))
    slot.begin(VERSION)
    with pytest.raises(RejectedError, match=f"400 files .* at most {META_MAX}"):
        slot.seal(SlotMeta("/ckpt", "shared", VERSION, Shape(1, True), placed))


def test_equal_files_give_equal_data_whatever_was_there_before(slot: Slot, tmp_path: Path) -> None:
    write(slot, files={"a": b"\xff" * 100_000})
    meta = write(slot)
    with Slot.create(tmp_path / "fresh.1", 100_000) as fresh:
        write(fresh)
        assert slot.data[: meta.data_length] == fresh.data[: meta.data_length]


def test_an_image_makes_an_equal_slot_elsewhere(slot: Slot, tmp_path: Path) -> None:
    meta = write(slot)
    image = bytes(slot.image())
    with Slot.create(tmp_path / "shared@4.1", meta.data_length) as copy:
        copy.begin(VERSION)
        copy.data[: len(image)] = image
        assert copy.seal_image(meta.data_length, len(image)) == meta
        assert content(copy) == FILES


@pytest.mark.parametrize("cut", [0, 1, 20])
def test_half_an_image_is_not_sealed(slot: Slot, tmp_path: Path, cut: int) -> None:
    meta = write(slot)
    image = bytes(slot.image())[: meta.data_length + cut]
    with Slot.create(tmp_path / "shared@4.1", meta.data_length) as copy:
        copy.begin(VERSION)
        copy.data[: len(image)] = image
        with pytest.raises(StateError, match="does not end with a meta"):
            copy.seal_image(meta.data_length, len(image))
        assert copy.read() is None


def test_a_slot_that_is_gone_or_too_short_is_said_clearly(path: Path) -> None:
    with pytest.raises(StateError, match="is gone"):
        Slot.open(path, writable=False)
    path.write_bytes(bytes(100))
    with pytest.raises(StateError, match="100 bytes, which is too short"):
        Slot.open(path, writable=False)


def test_readers_cannot_write(slot: Slot, path: Path) -> None:
    write(slot)
    with Slot.open(path, writable=False) as reader, pytest.raises(TypeError):
        reader.data[0] = 0


def test_nothing_outlives_the_mapping_silently(path: Path) -> None:
    """The prior art hands out tensors that alias the buffer of the next save."""
    slot = Slot.create(path, 100_000)
    write(slot)
    view = slot.file("empty")
    kept = slot.data[:10]
    with pytest.raises(StateError, match="is still alive"):
        slot.close()
    with pytest.raises(ValueError, match="released"):
        len(view)
    kept.release()
    slot.close()


def test_slots_are_for_their_user_only(slot: Slot, path: Path) -> None:
    assert path.stat().st_mode & 0o777 == 0o600
    assert slot.capacity >= 100_000


@given(st.lists(st.integers(min_value=0, max_value=20_000), max_size=8))
def test_files_stand_apart_and_aligned(lengths: list[int]) -> None:
    files = [(str(n), length) for n, length in enumerate(lengths)]
    placed, total = lay_out(files)
    assert [(file.name, file.length) for file in placed] == files
    end = 0
    for file in placed:
        assert file.offset % 4096 == 0
        assert file.offset >= end
        end = file.offset + file.length
    assert total == align(end)
    assert file_size(total) == HEADER + total + META_MAX
    assert SlotMeta("/d", "p", VERSION, Shape(1, True), placed).data_length == total


# ---- digests ----------------------------------------------------------------


def test_the_digest_is_what_the_format_says() -> None:
    data = os.urandom(CHUNK + 5)
    crcs = struct.pack("<II", crc32c(data[:CHUNK]), crc32c(data[CHUNK:]))
    assert digest_of(data) == crc32c(crcs)
    assert digest_of(b"") == combine([]) == Digest().result()


def test_a_digest_can_be_made_piece_by_piece() -> None:
    data = os.urandom(2 * CHUNK + 77)
    digest = Digest()
    for begin in range(0, len(data), 1_000_003):
        digest.update(data[begin : begin + 1_000_003])
    by_chunks = Digest()
    for begin in range(0, len(data), CHUNK):
        by_chunks.add(crc32c(data[begin : begin + CHUNK]))
    assert digest.result() == by_chunks.result() == digest_of(data)


def test_two_crcs_are_joined() -> None:
    data = random.Random(5).randbytes(70_000)
    for cut in (0, 1, 4095, 4096, 35_000, len(data) - 1, len(data)):
        first, second = data[:cut], data[cut:]
        assert join(crc32c(first), crc32c(second), len(second)) == crc32c(data)


def test_a_digest_can_be_made_of_runs_in_any_order() -> None:
    """Runs that end where no chunk does, and one that is read again after a byte has changed."""
    data = bytearray(random.Random(6).randbytes(2 * CHUNK + 5))
    digest = RunDigest()
    for begin, end in ((CHUNK - 3, len(data)), (0, 4096), (4096, CHUNK - 3), (7, 7)):
        with memoryview(data)[begin:end] as run:
            assert digest.read(begin, run) == crc32c(run)
    assert digest.result() == digest_of(data)
    data[CHUNK] ^= 1
    assert digest.result() != digest_of(data)
    with memoryview(data)[CHUNK - 3 :] as run:
        digest.read(CHUNK - 3, run)
    assert digest.result() == digest_of(data)
    assert RunDigest().result() == digest_of(b"")


def test_a_flipped_byte_changes_the_digest() -> None:
    data = bytearray(os.urandom(CHUNK + 1000))
    before = digest_of(data)
    for position in (0, CHUNK - 1, CHUNK, len(data) - 1):
        data[position] ^= 1
        assert digest_of(data) != before
        data[position] ^= 1


def test_digests_stand_beside_their_slot(slot: Slot, path: Path) -> None:
    meta = write(slot)
    assert read_sidecar(path) is None
    sidecar = Sidecar(meta.version, digest_of(slot.data[: meta.data_length]))
    write_sidecar(path, sidecar)
    assert read_sidecar(path) == sidecar
    assert sidecar_path(path).stat().st_mode & 0o777 == 0o600


def test_damaged_digests_are_no_digests(path: Path) -> None:
    write_sidecar(path, Sidecar(VERSION, 1))
    image = sidecar_path(path).read_bytes()
    for length in range(len(image)):
        sidecar_path(path).write_bytes(image[:length])
        assert read_sidecar(path) is None
    for position in range(len(image)):
        flipped = bytearray(image)
        flipped[position] ^= 16
        sidecar_path(path).write_bytes(flipped)
        assert read_sidecar(path) is None


# ---- what an agent keeps mapped ----------------------------------------------


def test_a_slot_stays_mapped_between_readings_and_is_forgotten_when_it_is_removed(
    path: Path,
) -> None:
    with Slot.create(path, 100_000) as slot:
        meta = write(slot)
    maps = SlotMaps()
    with maps.reading(path) as first:
        assert first.read() == meta
        assert content(first) == FILES
    with maps.reading(path) as again, maps.reading(path) as beside:
        assert again is first
        assert beside is not first
        assert content(beside) == FILES
    path.unlink()
    with pytest.raises(StateError, match="is gone"), maps.reading(path):
        pass
    with pytest.raises(ValueError, match="released"):
        len(first.data)
    maps.close()


def test_what_is_read_while_the_maps_are_closed_is_unmapped_afterwards(path: Path) -> None:
    with Slot.create(path, 100_000) as slot:
        write(slot)
    maps = SlotMaps()
    with maps.reading(path) as read:
        maps.close()
        assert content(read) == FILES
    with pytest.raises(ValueError, match="released"):
        len(read.data)
