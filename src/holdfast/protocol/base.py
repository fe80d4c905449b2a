# SPDX-License-Identifier: Apache-2.0
"""What every message is."""

from msgspec import Struct


class Message(Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the tag is the class name."""
