# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector, left out of runs that make many objects and no cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """A round of a large job makes tens of thousands of objects: the collector finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
