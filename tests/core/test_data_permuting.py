# SPDX-License-Identifier: Apache-2.0
"""The two ways to compute a shuffled order give the same order."""

import numpy as np
import pytest

from holdfast.client.permuting import permuted
from holdfast.model.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_many_at_once_are_the_same_as_one_by_one(size: int) -> None:
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (2**63, 7), (-5, 3)):
        order = Permutation(size, seed, epoch)
        numbers = permuted(order, 0, size)
        assert numbers.dtype == np.int64
        assert numbers.tolist() == [order[place] for place in range(size)]
        assert sorted(numbers.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [10**9, 2**40 + 1, 2**61])
def test_large_orders_are_the_same_too(size: int) -> None:
    order = Permutation(size, 42, 3)
    for begin in (0, size // 3, size - 50):
        expected = [order[place] for place in range(begin, begin + 50)]
        assert permuted(order, begin, begin + 50).tolist() == expected


def test_places_outside_are_refused() -> None:
    order = Permutation(10, 0, 0)
    assert permuted(order, 10, 10).tolist() == []
    for begin, end in ((-1, 3), (0, 11), (5, 4)):
        with pytest.raises(IndexError):
            permuted(order, begin, end)
