# SPDX-License-Identifier: Apache-2.0
"""Turns Python's garbage collector off where code makes many objects and no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Tens of thousands of new objects make the collector look at all there are, for nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
