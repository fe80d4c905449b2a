# SPDX-License-Identifier: Apache-2.0
"""What every image must be: pieces and holes cover it without gap or overlap."""

from holdfast.torch.checkpoint.images import Image


def gap(image: Image) -> int | None:
    """The first byte that is not covered exactly once; None if all are."""
    spans = [(offset, offset + len(data)) for offset, data in image.pieces]
    spans += [(hole.offset, hole.offset + hole.tensor.nbytes) for hole in image.holes]
    covered = 0
    for begin, end in sorted(spans):
        if begin != covered:
            return min(begin, covered)
        covered = end
    return None if covered == image.length else min(covered, image.length)
