# SPDX-License-Identifier: Apache-2.0
"""Logs the errors that end a process: its terminal may be gone by then."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.model.errors import HoldfastError
from holdfast.runtime.observe import Level, Say


@contextmanager
def errors_in(log: Say) -> Iterator[None]:
    """Write the error that ends the block into `log`; with its traceback if it is a bug."""
    try:
        yield
    except HoldfastError as exc:
        log(str(exc), Level.ERROR)
        raise
    except Exception:
        log(traceback.format_exc().rstrip(), Level.ERROR)
        raise
