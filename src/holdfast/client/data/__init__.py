# SPDX-License-Identifier: Apache-2.0
"""Data in small shares: every worker takes the next one when it needs it. See docs/data.md."""

from holdfast.client.data.parts import Part
from holdfast.client.data.shards import DataShards
from holdfast.client.data.streams import Record, StreamShards

__all__ = ["DataShards", "Part", "Record", "StreamShards"]
