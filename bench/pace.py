# SPDX-License-Identifier: Apache-2.0
"""What a copy costs the computation beside it, by its pace: why overlapped saves take their time.

Products of GPT-2 XL's shapes run on one core, alone, beside a copy, and alone again, in turns. What
they lose is divided by what was copied meanwhile. It has no bar: bench/checkpoint.py has.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import statistics
import sys
import threading
import time
from typing import Any

import torch

from common import (
    Bar,
    Spread,
    describe_machine,
    finish,
    print_machine,
    print_table,
    standard_parser,
)
from holdfast.checkpoint.copier import COPY_WITH_CRC

BYTES = 2**30
PIECE = 16 * 2**20
TOKENS, INNER, OUTER, MATRICES = 256, 1600, 6400, 16
WINDOW_S = 0.15
"""How long the products run in each part of a turn."""
PACES = (0.0, 8e9, 6e9, 5e9, 4e9, 3e9, 2e9)
"""Bytes a second; 0: as fast as it can."""


class Products:
    """A computation on one core whose matrices do not fit into any cache."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._matrices = [torch.randn(OUTER, INNER) for _ in range(MATRICES)]
        self._rows = torch.randn(TOKENS, INNER)
        self._next = 0
        self._count = 2 * MATRICES
        self._count = max(2, round(WINDOW_S / (self.run() / self._count)))

    def run(self) -> float:
        """Seconds for as many products as fit into a window."""
        began = time.perf_counter()
        for _ in range(self._count):
            torch.nn.functional.linear(self._rows, self._matrices[self._next])
            self._next = (self._next + 1) % MATRICES
        return time.perf_counter() - began


class Copying:
    """Copies round and round into shared memory that is faulted in, until it is told to stop."""

    def __init__(self) -> None:
        assert COPY_WITH_CRC is not None, "the C extension was not built"
        self._copy = COPY_WITH_CRC
        self._memory = mmap.mmap(-1, BYTES)
        self._target = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._target, 1, BYTES)
        self._source = torch.ones(BYTES, dtype=torch.uint8)

    def beside(self, products: Products, pace: float) -> tuple[float, int]:
        """Seconds of the products beside the copy, and how many bytes were copied meanwhile."""
        stop, done = threading.Event(), 0

        def copy() -> None:
            nonlocal done
            while not stop.is_set():
                at = done % BYTES
                self._copy(self._target + at, self._source.data_ptr() + at, PIECE, 0, pace)
                done += PIECE

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            took_s = products.run()
            copied = done
        finally:
            stop.set()
            thread.join()
        return took_s, copied


def main() -> int:
    parser = standard_parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=60)
    args = parser.parse_args()
    turns = 2 if args.quick else args.turns
    machine = describe_machine()
    print_machine(machine)
    products, copying = Products(), Copying()
    lost: dict[float, list[float]] = {pace: [] for pace in PACES}
    speeds: dict[float, list[float]] = {pace: [] for pace in PACES}
    for _ in range(turns):
        for pace in random.sample(PACES, len(PACES)):
            before_s = products.run()
            took_s, copied = copying.beside(products, pace)
            alone_s = (before_s + products.run()) / 2
            lost[pace].append(1e12 * (took_s - alone_s) / max(copied, PIECE))
            speeds[pace].append(copied / took_s / 1e9)
    rows = []
    for pace in PACES:
        draws = (random.choices(lost[pace], k=turns) for _ in range(200))
        error = statistics.stdev(map(statistics.median, draws))
        name = f"{pace / 1e9:g} GB/s" if pace else "as fast as it can"
        median = f"{statistics.median(lost[pace]):.1f} +- {error:.1f}"
        rows.append((name, median, str(Spread.of(speeds[pace]))))
    columns = ("pace", "lost, ms for each GB", "copied, GB/s")
    print_table("Products beside a copy", columns, rows)
    bars: list[Bar] = []
    document: dict[str, Any] = {"machine": machine, "lost": lost, "speeds": speeds}
    return finish(bars, document, args)


if __name__ == "__main__":
    sys.exit(main())
