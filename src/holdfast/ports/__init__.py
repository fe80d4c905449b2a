# SPDX-License-Identifier: Apache-2.0
"""What the drivers need from the world, as Protocols with their guarantees written down."""

from holdfast.ports.journal import Entry, Journal
from holdfast.ports.platform import Order, Platform, Sighting
from holdfast.ports.stream import StreamReader

__all__ = ["Entry", "Journal", "Order", "Platform", "Sighting", "StreamReader"]
