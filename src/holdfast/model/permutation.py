# SPDX-License-Identifier: Apache-2.0
"""A shuffle that costs no memory: the n-th number of a random order, computed from n alone.

Four rounds of a Feistel network over the smallest even number of bits that holds the size; what
falls outside is sent round again (cycle walking), at most a few times on average. The order depends
on the seed, the epoch and the size, on nothing else, and must never change: positions in saved
checkpoints refer to it.
"""

_MASK = (1 << 64) - 1
_ROUNDS = 4


class Permutation:
    """The order of one epoch."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self.size = size
        self.half_bits = max(1, ((max(1, size - 1)).bit_length() + 1) // 2)
        self.keys = tuple(
            mix((seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + number) & _MASK)
            for number in range(_ROUNDS)
        )

    def __getitem__(self, index: int) -> int:
        """Which number is at this place of the order."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not within 0..{self.size - 1}")
        low = (1 << self.half_bits) - 1
        while True:
            left, right = index >> self.half_bits, index & low
            for key in self.keys:
                left, right = right, left ^ (mix(right + key) & low)
            index = left << self.half_bits | right
            if index < self.size:
                return index


def mix(number: int) -> int:
    """Spread the bits of a 64-bit number over all of it (the finalizer of splitmix64)."""
    number &= _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
