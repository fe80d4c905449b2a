# SPDX-License-Identifier: Apache-2.0
"""Prints $LINES_TO_PRINT long lines to each stream, the last one without an end, and exits."""

import os
import sys

rank = os.environ["RANK"]
count = int(os.environ["LINES_TO_PRINT"])
for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
    stream.write("".join(f"{name} {rank} {number:07} {'x' * 85}\n" for number in range(count)))
    stream.write(f"{name} {rank} end")
