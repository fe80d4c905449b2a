# SPDX-License-Identifier: Apache-2.0
"""Many numbers of a random order at once: what model/permutation.py computes one by one."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from holdfast.model.permutation import Permutation

Records = NDArray[np.int64]
Places = NDArray[np.uint64]

TABLE_BITS = 16
"""If half a number has at most this many bits, what a round does to it is looked up."""


def permuted(order: Permutation, begin: int, end: int) -> Records:
    """The numbers at the places `begin` to `end` of the order."""
    if not 0 <= begin <= end <= order.size:
        raise IndexError(f"{begin}..{end} is not within 0..{order.size}")
    return numbers_at(order, np.arange(begin, end, dtype=np.uint64)).astype(np.int64)


def numbers_at(order: Permutation, places: Places) -> Places:
    """The numbers at these places of the order, all of which are within it."""
    numbers = _sent_round(order, places)
    outside = np.flatnonzero(numbers >= order.size)
    while len(outside):
        walked = _sent_round(order, numbers[outside])
        numbers[outside] = walked
        outside = outside[walked >= order.size]
    return numbers


def _sent_round(order: Permutation, numbers: Places) -> Places:
    bits, low = np.uint64(order.half_bits), np.uint64((1 << order.half_bits) - 1)
    left, right = numbers >> bits, numbers & low
    if order.half_bits <= TABLE_BITS:
        for table in _tables(order.half_bits, order.keys):
            left, right = right, left ^ table.take(right)
    else:
        for key in order.keys:
            left, right = right, left ^ (_mix(right + np.uint64(key)) & low)
    return left << bits | right


@lru_cache(maxsize=4)
def _tables(half_bits: int, keys: tuple[int, ...]) -> tuple[Places, ...]:
    """What each round makes of every half. Kept, because an order is read for a whole epoch."""
    halves, low = np.arange(1 << half_bits, dtype=np.uint64), np.uint64((1 << half_bits) - 1)
    return tuple(_mix(halves + np.uint64(key)) & low for key in keys)


def _mix(numbers: Places) -> Places:
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
