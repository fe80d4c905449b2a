# SPDX-License-Identifier: Apache-2.0
"""The order in which an epoch visits a dataset, computed piece by piece: it costs no memory.

It is `holdfast.model.permutation` for many places at a time: a single number takes ten microseconds
in plain Python, one of thousands takes a tenth of that with numpy.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from holdfast.client.permuting import numbers_at
from holdfast.model.permutation import Permutation

AT_ONCE = 4096
"""The most places that are computed together."""


class Order:
    """The sample at each place. It depends on these four values and on nothing else."""

    def __init__(self, length: int, seed: int, epoch: int, shuffle: bool) -> None:
        self._length = length
        self._permutation = Permutation(length, seed, epoch) if shuffle else None

    def lists(self, wanted: Iterable[range]) -> Iterator[list[int]]:
        """For each range of places the samples there. After the last place comes the first."""
        pieces: list[range] = []
        count = 0
        for places in wanted:
            pieces.append(places)
            count += len(places)
            if count >= AT_ONCE:
                yield from self._look_up(pieces)
                pieces, count = [], 0
        yield from self._look_up(pieces)

    def _look_up(self, pieces: list[range]) -> Iterator[list[int]]:
        if not pieces:
            return
        arrays = [np.arange(p.start, p.stop, p.step, dtype=np.uint64) for p in pieces]
        places = np.concatenate(arrays) % np.uint64(self._length)
        if self._permutation is not None:
            places = numbers_at(self._permutation, places)
        samples = places.tolist()
        first = 0
        for piece in pieces:
            yield samples[first : first + len(piece)]
            first += len(piece)
