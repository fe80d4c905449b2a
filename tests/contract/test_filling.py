# SPDX-License-Identifier: Apache-2.0
"""Copies into a slot and out of it give its digest on the way, whatever is copied."""

import os
import random
import time

import pytest
from crc32c import crc32c

from holdfast.checkpoint.copier import COPY_WITH_CRC, Copier, Copy, CopyWithCrc, Pace
from holdfast.checkpoint.digests import CHUNK, digest_of
from holdfast.checkpoint.filling import Filling, copy_then_crc, take
from holdfast.checkpoint.memory import address_of

WAIT_S = 120.0


@pytest.fixture
def copy() -> CopyWithCrc:
    if COPY_WITH_CRC is None:
        pytest.skip("the C extension was not built: there was no compiler")
    return COPY_WITH_CRC


def test_the_crc_is_that_of_the_bytes_and_goes_on_from_the_one_before(copy: CopyWithCrc) -> None:
    numbers = random.Random(5)
    source, target = os.urandom(5000), bytearray(5000)
    source_address, target_address = address_of(memoryview(source)), address_of(memoryview(target))
    lengths = [*range(300), *(numbers.randrange(300, 4900) for _ in range(300))]
    for length in lengths:
        begin, end = numbers.randrange(100), numbers.randrange(100)
        before = numbers.getrandbits(32)
        crc = copy(target_address + end, source_address + begin, length, before)
        assert crc == crc32c(source[begin : begin + length], before)


LENGTHS = [1, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 12_345]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("pace", [0.0, 2e9])
def test_the_digest_is_that_of_what_is_there_afterwards(
    copy: CopyWithCrc, length: int, share: float, pace: float
) -> None:
    """`share` of the bytes are copied, in pieces of any size and any order; the rest was there."""
    numbers = random.Random(length)
    source, target = os.urandom(length), bytearray(os.urandom(length + 100))
    source_address, target_address = address_of(memoryview(source)), address_of(memoryview(target))
    expected, copies, at = bytearray(target), [], 0
    while at < length:
        size = min(length - at, numbers.choice([1, 63, 5000, 3_000_000, CHUNK]))
        if numbers.random() < share:
            copies.append(Copy(source_address + at, target_address + at, size))
            expected[at : at + size] = source[at : at + size]
        at += size
    numbers.shuffle(copies)
    filling = Filling(copy, memoryview(target), target_address, length)
    assert filling.digest == -1
    copier = Copier(threads=2)
    copier.run(filling.tasks(copies, Pace(pace)), WAIT_S)
    copier.close()
    assert target == expected
    assert filling.digest == digest_of(expected[:length])


def test_each_slot_takes_the_copies_that_go_to_it(copy: CopyWithCrc) -> None:
    source, targets = os.urandom(1000), [bytearray(1000), bytearray(1000)]
    addresses = [address_of(memoryview(target)) for target in targets]
    copies = [Copy(address_of(memoryview(source)), address, 1000) for address in addresses]
    for target, address in zip(targets, addresses, strict=True):
        filling = Filling(copy, memoryview(target), address, 1000)
        copier = Copier(threads=1)
        copier.run(filling.tasks(copies, Pace()), WAIT_S)
        copier.close()
        assert filling.digest == digest_of(source)
    assert targets == [source, source]


def test_a_digest_is_not_known_before_all_chunks_are_there(copy: CopyWithCrc) -> None:
    target = bytearray(2 * CHUNK)
    filling = Filling(copy, memoryview(target), address_of(memoryview(target)), len(target))
    for task in filling.tasks([], Pace()):
        assert filling.digest == -1
        assert callable(task)
        task()
    assert filling.digest == digest_of(target)


def test_a_pace_is_kept(copy: CopyWithCrc) -> None:
    """As fast as it can, this takes a few milliseconds."""
    source, target = bytes(4 * CHUNK), bytearray(4 * CHUNK)
    address = address_of(memoryview(target))
    filling = Filling(copy, memoryview(target), address, len(target))
    copies = [Copy(address_of(memoryview(source)), address, len(target))]
    began = time.monotonic()
    for task in filling.tasks(copies, Pace(1e9)):
        assert callable(task)
        task()
    assert time.monotonic() - began > 0.5 * len(target) / 1e9


# ---- out of a slot -------------------------------------------------------------------------------

COPIES_OUT = [
    pytest.param(copy_then_crc, id="without the extension"),
    pytest.param(
        COPY_WITH_CRC,
        id="with the extension",
        marks=pytest.mark.skipif(COPY_WITH_CRC is None, reason="it was not built"),
    ),
]


@pytest.mark.parametrize("copy_out", COPIES_OUT)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_what_is_taken_gives_the_digest_of_the_slot(
    copy_out: CopyWithCrc, length: int, share: float
) -> None:
    """`share` of the bytes are taken, some of them twice; the rest only counts."""
    numbers = random.Random(length)
    slot, target = os.urandom(length + 100), bytearray(2 * length)
    here, there = address_of(memoryview(slot)), address_of(memoryview(target))
    expected, copies, at = bytearray(target), [], 0
    while at < length:
        size = min(length - at, numbers.choice([1, 63, 5000, 3_000_000, CHUNK]))
        for place in (at, length + at):
            if numbers.random() < share:
                copies.append(Copy(here + at, there + place, size))
                expected[place : place + size] = slot[at : at + size]
        at += size
    numbers.shuffle(copies)
    copier = Copier(threads=2)
    digests = take(copier, [(memoryview(slot), here, length)], copies, WAIT_S, copy_out)
    copier.close()
    assert target == expected
    assert digests == [digest_of(slot[:length])]


@pytest.mark.parametrize("copy_out", COPIES_OUT)
def test_the_digest_is_of_the_bytes_that_arrived(copy_out: CopyWithCrc) -> None:
    """What copies itself comes first: a change before it is in the digest, as it is in the copy."""
    slot, target = bytearray(os.urandom(3 * 4096)), bytearray(3 * 4096)
    here, there = address_of(memoryview(slot)), address_of(memoryview(target))
    saved = digest_of(slot)

    def changed_and_taken() -> None:
        slot[5000] ^= 1
        target[4096:8192] = slot[4096:8192]

    tasks = [Copy(here, there, 4096), changed_and_taken]
    copier = Copier(threads=1)
    digests = take(copier, [(memoryview(slot), here, len(slot))], tasks, WAIT_S, copy_out)
    copier.close()
    assert digests == [digest_of(slot)] != [saved]
    assert target[:8192] == slot[:8192]


def test_each_copy_comes_out_of_its_own_slot() -> None:
    slots, target = [os.urandom(1000), os.urandom(2000)], bytearray(3000)
    outside = os.urandom(10)
    addresses = [address_of(memoryview(slot)) for slot in slots]
    there = address_of(memoryview(target))
    tasks = [
        Copy(addresses[1], there + 1000, 2000),
        Copy(addresses[0], there, 1000),
        Copy(address_of(memoryview(outside)), there + 5, 10),
    ]
    copier = Copier(threads=1)
    given = [
        (memoryview(slot), address, len(slot))
        for slot, address in zip(slots, addresses, strict=True)
    ]
    assert take(copier, given, tasks[:2], WAIT_S) == [digest_of(slot) for slot in slots]
    assert target == slots[0] + slots[1]
    take(copier, [], tasks[2:], WAIT_S)
    assert target[5:15] == outside
    copier.close()
