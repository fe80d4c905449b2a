# SPDX-License-Identifier: Apache-2.0
"""Hostile bytes: nothing but a ProtocolError comes out of the reader, and nothing stalls it."""

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.job import records as rec
from holdfast.model.errors import ProtocolError
from holdfast.protocol import messages as m
from holdfast.protocol.codec import (
    FRAME_BYTES_MAX,
    HANDSHAKE_BYTES_MAX,
    FrameReader,
    client_mac,
    decode,
    encode,
    same_mac,
    server_mac,
)
from tests.wire.samples import MESSAGES, RECORDS

FRAMES = [encode(body, 1, "s", 2) for body in MESSAGES]
LIMIT = 4096

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def drained(reader: FrameReader, data: bytes) -> list[m.Frame] | None:
    """What came out; None if the bytes were refused."""
    frames: list[m.Frame] = []
    try:
        frames.extend(reader.feed(data))
    except ProtocolError:
        return None
    return frames


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes(data: bytes) -> None:
    drained(FrameReader(LIMIT), data)
    drained(FrameReader(LIMIT), struct.pack("<I", len(data)) + data)


@given(anything)
@settings(max_examples=300, deadline=None)
def test_well_formed_bytes_that_mean_nothing(value: object) -> None:
    for payload in (value, [0, value], [0, ["KvSet", value, value, value]]):
        try:
            frame = decode(msgspec.msgpack.encode(payload))
        except ProtocolError:
            continue
        assert isinstance(frame, m.Frame)


@given(st.sampled_from(FRAMES), st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_frames(frame: bytes, data: st.DataObject) -> None:
    """Flipped bytes in the payload, the length kept."""
    mutated = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(4, len(frame) - 1))
        mutated[position] = data.draw(st.integers(0, 255))
    drained(FrameReader(LIMIT), bytes(mutated))


@given(st.lists(st.sampled_from(FRAMES), max_size=8), st.lists(st.integers(1, 64), min_size=1))
@settings(max_examples=200, deadline=None)
def test_frames_survive_any_cutting(frames: list[bytes], sizes: list[int]) -> None:
    stream, reader, received = b"".join(frames), FrameReader(LIMIT), 0
    position = turn = 0
    while position < len(stream):
        step = sizes[turn % len(sizes)]
        received += len(list(reader.feed(stream[position : position + step])))
        position, turn = position + step, turn + 1
    assert received == len(frames)


@given(st.sampled_from(FRAMES), st.data())
@settings(max_examples=100, deadline=None)
def test_a_truncated_frame_waits_and_a_shortened_one_is_refused(
    frame: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(frame) - 1))
    reader = FrameReader(LIMIT)
    assert drained(reader, frame[:cut]) == []
    assert drained(reader, frame[cut:]) == list(FrameReader().feed(frame))
    payload = frame[4 : 4 + data.draw(st.integers(0, len(frame) - 5))]
    assert drained(FrameReader(LIMIT), struct.pack("<I", len(payload)) + payload) is None


@given(st.integers(LIMIT + 1, 2**32 - 1), st.binary(max_size=16))
@settings(max_examples=50, deadline=None)
def test_an_oversized_frame_is_refused_before_it_is_stored(length: int, start: bytes) -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        list(FrameReader(LIMIT).feed(struct.pack("<I", length) + start))


def test_a_frame_at_the_limit_passes() -> None:
    body = m.KvSet(0, "k", b"x" * 200)
    frame = encode(body)
    assert len(list(FrameReader(len(frame) - 4).feed(frame))) == 1
    with pytest.raises(ProtocolError):
        list(FrameReader(len(frame) - 5).feed(frame))


def test_nobody_sends_a_frame_over_the_limit() -> None:
    with pytest.raises(ProtocolError, match=r"KvSet of 167\d+ bytes is over the frame limit"):
        encode(m.KvSet(0, "k", b"x" * FRAME_BYTES_MAX))


def test_every_handshake_frame_fits_its_own_limit() -> None:
    for body in MESSAGES:
        if isinstance(body, m.Handshake):
            assert len(encode(body)) - 4 <= HANDSHAKE_BYTES_MAX


def test_the_limit_can_be_raised_after_the_handshake() -> None:
    reader = FrameReader(HANDSHAKE_BYTES_MAX)
    large = encode(m.KvSet(0, "k", b"x" * 2000))
    reader.limit = FRAME_BYTES_MAX
    assert len(list(reader.feed(large))) == 1


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    for depth in (100, 5_000, 100_000):
        nested = b"\x91" * depth + b"\xc0"
        with pytest.raises(ProtocolError):
            decode(nested)
        with pytest.raises(ProtocolError):
            decode(b"\x94\x00\x95" + nested)
        # In a place that the schema skips: ignored or refused, but never a crash.
        payload = b"\x95\x00\x91\xa4Done\xa0\x00" + nested
        frames = drained(FrameReader(), struct.pack("<I", len(payload)) + payload)
        assert frames in ([m.Frame(0, m.Done())], None)


def test_a_lying_length_inside_the_payload_is_refused() -> None:
    for lie in (b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            decode(lie)
        with pytest.raises(ProtocolError):
            decode(b"\x92\x00\x92\xa5Value" + lie)


@given(st.sampled_from([rec.encode_record(record) for record in RECORDS]), st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_record_is_named_as_such(payload: bytes, data: st.DataObject) -> None:
    """The journal's reader relies on DecodeError: anything else would hide what is damaged."""
    mutated = bytearray(payload)
    position = data.draw(st.integers(0, len(payload) - 1))
    mutated[position] = data.draw(st.integers(0, 255))
    try:
        rec.decode_record(bytes(mutated[: data.draw(st.integers(0, len(mutated)))]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return


def test_proofs_differ_by_side_token_and_challenge() -> None:
    token, server, client = b"secret", b"s" * 32, b"c" * 32
    proofs = {
        client_mac(token, server, client),
        server_mac(token, server, client),
        client_mac(b"other", server, client),
        client_mac(token, b"t" * 32, client),
        client_mac(token, server, b"d" * 32),
    }
    assert len(proofs) == 5
    assert same_mac(client_mac(token, server, client), client_mac(token, server, client))
    assert not same_mac(client_mac(token, server, client), b"")


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_nonce_of_another_length_is_refused(length: int) -> None:
    """Proofs are computed over the two nonces in a row: where one ends must not be a choice."""
    for body in (m.Challenge(1, bytes(length)), m.Proof(1, bytes(length), bytes(32))):
        assert drained(FrameReader(LIMIT), encode(body)) is None
