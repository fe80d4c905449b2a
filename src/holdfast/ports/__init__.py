# SPDX-License-Identifier: Apache-2.0
"""What the drivers need from the world, as Protocols with their guarantees written down."""

from holdfast.ports.desk import Desk
from holdfast.ports.journal import Entry, Journal
from holdfast.ports.platform import Platform, Sighting
from holdfast.ports.stream import StreamReader

__all__ = ["Desk", "Entry", "Journal", "Platform", "Sighting", "StreamReader"]
