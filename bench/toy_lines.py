# SPDX-License-Identifier: Apache-2.0
"""A worker that prints. Usage: toy_lines.py MEGABYTES lines|bars"""

from __future__ import annotations

import os
import sys

LINE = b"epoch 3 | step %08d | loss 2.34567 | lr 1.0e-04 | 1234 tokens/s | something more to read\n"
BAR = b"\repoch 3: %8d/99999999 [00:12<00:34, 1234.5it/s, loss=2.34567, more to read here]"


def main() -> None:
    size, text = int(sys.argv[1]) * 1_000_000, LINE if sys.argv[2] == "lines" else BAR
    written = number = 0
    while written < size:
        block = b"".join(text % (number + at) for at in range(100))
        number += 100
        written += len(block)
        while block:
            block = block[os.write(1, block) :]


if __name__ == "__main__":
    main()
