# SPDX-License-Identifier: Apache-2.0
"""Objects that only pickle can save: the one place where our state contains it.

Reading a pickle runs whatever it says, so nothing here happens unless the caller of both the save
and the load said `allow_pickle=True`.
"""

import pickle
import struct

NOT_LOADED = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError),
    *(AttributeError, TypeError, ArithmeticError, AssertionError, MemoryError, struct.error),
)
"""What torch.load says to a file that it cannot read, or only by running what stands in it."""


def to_bytes(value: object) -> bytes:
    """The object as a pickle. TypeError and its kind: not even pickle can save it."""
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError) as exc:
        raise TypeError(str(exc)) from exc


def from_bytes(data: bytes) -> object:
    """The object again. It runs code that the pickle names."""
    return pickle.loads(data)
