# SPDX-License-Identifier: Apache-2.0
"""The stream port: a broker whose records have offsets."""

from collections.abc import Generator, Mapping
from typing import Protocol


class StreamReader(Protocol):
    """Reads a stream that is cut into partitions, each a row of records with the offsets n, n+1...

    Guarantees: an offset names the same bytes for ever, or nothing any more; a record is never left
    out, a missing one is a StateError that says which. A reader acknowledges nothing to the broker
    and shares no cursor: only the data ledger knows what was read. A call waits for a broker that
    is away, up to the limit that every call has, and then raises TimedOutError.

    Threads may use it together, and a forked child may go on with it.
    """

    @property
    def origin(self) -> int:
        """The offset of the first record that was ever written to a partition."""

    def partitions(self) -> tuple[str, ...]:
        """Their names. The same for every process of a job, in the same order."""

    def ends(self) -> dict[str, int]:
        """The offset after the last record of each partition. It only rises."""

    def wait_until(self, ends: Mapping[str, int], timeout_s: float) -> dict[str, int]:
        """The ends of all partitions, once one of these ends there or beyond, or after the time."""

    def read(self, partition: str, begin: int, end: int) -> Generator[bytes, None, None]:
        """The records from `begin` to before `end`, in order. Waits for what is not written yet."""

    def close(self) -> None:
        """Leave the broker. Idempotent."""
