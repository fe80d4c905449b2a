# SPDX-License-Identifier: Apache-2.0
"""The samples of a part, whatever the dataset is made of. For readers that read ahead."""

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.client.data.parts import Part, lines, records
from holdfast.model.dataset import LINES, RANGE, Dataset
from holdfast.model.errors import UsageError


def samples(dataset: Dataset, part: Part, read: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """The samples of the rest of a part: how far the part is consumed with each, and the sample.

    `read` makes a sample of a record number or of a line. For streams and listed shards it gets the
    part, and yields the samples from `part.given` to `part.end`.
    """
    if dataset.kind == RANGE:
        numbers = records(dataset, part.epoch, part.given, part.end)
        for upto, number in enumerate(numbers.tolist(), start=part.given + 1):
            yield upto, read(number)
    elif dataset.kind == LINES:
        for end, line in lines(part):
            yield min(end, part.end), read(line)
    else:
        upto = part.given
        for upto, sample in enumerate(read(part), start=part.given + 1):
            if upto > part.end:
                raise UsageError(f"{part} has more samples than it should")
            yield upto, sample
        if upto < part.end:
            raise UsageError(f"the samples of {part} go up to {upto} only")
