# SPDX-License-Identifier: Apache-2.0
"""Objects that only pickle can save: the only place where a state of Holdfast contains pickles.

Reading a pickle runs the code that it names, so nothing here happens unless the caller of both the
save and the load set `allow_pickle=True`.
"""

import pickle
import struct

NOT_LOADED = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError),
    *(AttributeError, TypeError, ArithmeticError, AssertionError, MemoryError, struct.error),
)
"""Errors of torch.load for a file that it cannot read, or only by running code in it."""


def to_bytes(value: object) -> bytes:
    """The object as a pickle. TypeError and the like: not even pickle can save it."""
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError) as exc:
        raise TypeError(str(exc)) from exc


def from_bytes(data: bytes) -> object:
    """The object of a pickle. It runs code that the pickle names."""
    return pickle.loads(data)
