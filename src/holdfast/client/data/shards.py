# SPDX-License-Identifier: Apache-2.0
"""DataShards: what a training script reads its share of a dataset with.

shards = DataShards("train", size=len(dataset), shard_size=1000, epochs=3, shuffle="samples")
for epoch in shards.epochs():
    for batch in shards.batches(32):
        ...
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from os import getpid
from time import monotonic
from types import TracebackType
from typing import Any, Protocol

import msgspec

from holdfast.client.data import parts
from holdfast.client.data.holdings import Claims, Holdings
from holdfast.client.data.ledgers import Ledger, OwnLedger, connect_ledger
from holdfast.client.data.parts import Part
from holdfast.client.data.reading import Reader, in_chunks
from holdfast.client.permuting import Records
from holdfast.model.dataset import (
    IN_ORDER,
    LINES,
    LISTED,
    RANGE,
    STREAM,
    TRAIN,
    Dataset,
    Extent,
    Position,
)
from holdfast.model.errors import UsageError
from holdfast.protocol.data import Mark

__all__ = ["DataShards", "Follows"]

Files = Sequence[str | os.PathLike[str]]


class _Process:
    """This process. Every record looks at it, so the system is asked again only after a fork."""

    pid = getpid()


def _forked() -> None:
    _Process.pid = getpid()


os.register_at_fork(after_in_child=_forked)


class Follows(Protocol):
    """A Checkpointer, as far as data is concerned."""

    @property
    def directory(self) -> str: ...

    def follow(self, source: "DataShards") -> None: ...


class DataShards:
    """The samples of a dataset for this worker: each goes to one worker only.

    Threads may read it together, each with an iterator of its own. What an iterator has handed out
    counts as consumed in the next checkpoint; it counts as finished once the next is asked for.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int | None = None,
        files: Files | None = None,
        partitions: Mapping[str, tuple[int, int | None]] | None = None,
        listed: Sequence[tuple[str, int]] | None = None,
        grows: bool = False,
        shard_size: int = 1000,
        epochs: int = 1,
        shuffle: str = IN_ORDER,
        seed: int = 0,
        task: str = TRAIN,
        attempts: int = 3,
        checkpointer: Follows | None = None,
        prefetch: int = 1,
        report_every_s: float = 1.0,
        ledger: Ledger | None = None,
    ) -> None:
        """One of `size`, `files`, `partitions` and `listed` says what is read.

        `size`: the records 0..size. `files`: the lines of text files. `partitions` of a stream: the
        first offset of each and the one after the last, or None if it has no end. `listed`: shards
        by name, with the number of their samples; an empty list if `add` will name them.
        `grows`: the ledger deals only what it was told is written, see StreamShards.
        `shard_size` counts records, bytes or offsets; docs/data.md tells how to choose it.
        """
        kind, extents = _kind(size, files, partitions, listed)
        self.ledger = connect_ledger() if ledger is None else ledger
        self.dataset = Dataset(
            name=name,
            kind=kind,
            size=size or 0,
            shard_size=shard_size,
            epochs=epochs,
            shuffle=shuffle,
            seed=seed,
            extents=extents,
            task=task,
            series=self.ledger.series(name, "" if checkpointer is None else checkpointer.directory),
            attempts=attempts,
            grows=grows,
        )
        self.holdings = Holdings(
            self.ledger, self.dataset, prefetch=prefetch, report_every_s=report_every_s
        )
        self._pid = _Process.pid
        if checkpointer is not None:
            # Known to the ledger before anything is restored: the position comes with the model.
            self.holdings.open()
            checkpointer.follow(self)
        if listed:
            self.add(listed, is_last=True)

    # ---- reading --------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """The epochs that are left, beginning with the one that is not finished.

        An epoch that the loop left before its end comes again, with the rest of its samples.
        """
        holdings = self._here()
        while self.dataset.epochs == 0 or holdings.epoch() < self.dataset.epochs:
            yield holdings.epoch()

    def __iter__(self) -> Iterator[int]:
        """The record numbers of the epoch, one by one."""
        holdings = self._of_records()
        epoch = holdings.epoch()
        while (part := holdings.next_part(epoch, wait=True)) is not None:
            try:
                yield from self._each(holdings, part)
            finally:
                holdings.finish([(part, part.given)])
                holdings.put_back([part] if part.given < part.end else [])

    def _each(self, holdings: Holdings, part: Part) -> Iterator[int]:
        at, term, pid = part.given, part.term, self._pid
        for chunk in in_chunks(holdings, part):
            for record in chunk:
                part.done = at
                at += 1
                part.given = at
                yield record
                if monotonic() >= holdings.report_at or _Process.pid != pid:
                    part.done = at
                    self._here().report_if_due()
                    if part.is_wanted:
                        holdings.share(part, at)
                        return  # What is left of it comes again.
                if holdings.term != term:
                    return

    def batches(self, size: int, *, wait: bool = True) -> Iterator[Records]:
        """The record numbers of the epoch in batches of this size; the last ones may be smaller.

        With `wait=False`, for ranks that make every step together: an empty batch when there is
        nothing for this rank now. It must not wait for the other ranks, because they wait for it.
        """
        if size < 1:
            raise UsageError(f"a batch has 1 record at least, not {size}")
        holdings = self._of_records()
        epoch = holdings.epoch()
        reader = Reader(holdings, epoch, waits=wait)
        in_hand: Claims = ()
        try:
            while True:
                numbers, claims = reader.draw(size)
                if not claims and (wait or holdings.epoch() != epoch):
                    return
                if holdings.deliver(claims):
                    in_hand = claims
                    yield numbers
                    self._here().finish(in_hand)
                    holdings.report_if_due()
        finally:
            holdings.finish(in_hand)
            reader.leave()

    def pieces(self) -> Iterator[Part]:
        """The epoch in parts, for callers that read them on their own.

        A part counts as consumed when the next one is asked for, or as far as `consumed` said.
        """
        holdings = self._here()
        epoch = holdings.epoch()
        while (part := holdings.next_part(epoch, wait=True)) is not None:
            upto = part.given
            try:
                yield part
                upto = part.end
            finally:
                upto = max(upto, part.given)
                self._here().finish([(part, upto)])
                holdings.put_back([part] if upto < part.end else [])

    def lines(self, part: Part) -> Iterator[tuple[int, bytes]]:
        """The lines of a part: where each ends in the file, and the line with its line break."""
        if self.dataset.kind != LINES:
            raise UsageError(f"{self.dataset.name!r} is not made of files, it has no lines")
        for end, line in parts.lines(part):
            part.done, part.given = part.given, min(end, part.end)
            yield end, line
            self._here().report_if_due()
            if part.is_wanted:
                self.holdings.share(part, part.given)

    def consumed(self, part: Part, upto: int) -> None:
        """Everything of this part before `upto` is consumed."""
        if not part.given <= upto <= part.end:
            raise UsageError(f"{part} was consumed up to {part.given}, {upto} cannot be next")
        part.done = part.given = upto
        self._here().report_if_due()

    def failed(self, part: Part, why: str) -> None:
        """The rest of this part cannot be read: other workers try, then it is set aside for
        good."""
        self._here().fail(part, why or "no reason given")

    def add(self, shards: Sequence[tuple[str, int]], *, is_last: bool = False) -> None:
        """Name more shards of a listed dataset, the same on every rank."""
        if self.dataset.kind != LISTED:
            raise UsageError(f"the shards of {self.dataset.name!r} are not listed")
        self._here().add(tuple((str(key), int(size)) for key, size in shards), is_last)

    # ---- checkpoints ----------------------------------------------------------------------------

    def marks(self) -> tuple[Mark, ...]:
        """How far this rank is, for a save: in the parts it has, and in those that ended since the
        last."""
        return self.holdings.marks()

    def restored(self) -> None:
        """The model was restored, and the ledger has moved to its position: begin there."""
        self.holdings.drop()

    def state_dict(self) -> dict[str, Any]:
        """Where the data is, to be saved as `data`.

        Under an agent this is for people to read: the position itself is in the checkpoint's
        commit, for all ranks together. In a process on its own the position is in here.
        """
        state = {
            "name": self.dataset.name,
            "epoch": self.holdings.epoch(),
            "consumed": self.holdings.consumed(),
        }
        if isinstance(self.ledger, OwnLedger):
            position = self.ledger.position(self.dataset, self.marks())
            values = zip(Position.__struct_fields__, msgspec.to_builtins(position), strict=True)
            state["position"] = dict(values)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where `state_dict` was. Under an agent the restore has done that already."""
        if not isinstance(self.ledger, OwnLedger):
            return
        values = state.get("position")
        if values is None:
            raise UsageError(
                f"this state of {state.get('name')!r} was saved by several processes: its position "
                "is in the checkpoint, and only `holdfast run` brings it back"
            )
        known = [values[field] for field in Position.__struct_fields__ if field in values]
        self.holdings.open()
        self.ledger.adopt(self.dataset, msgspec.convert(known, Position, strict=False))
        self.holdings.drop()

    # ---- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what is not read. Not needed when an epoch was read to its end."""
        if self._pid == _Process.pid:
            self.holdings.close()

    def __enter__(self) -> "DataShards":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _of_records(self) -> Holdings:
        if self.dataset.kind != RANGE:
            raise UsageError(f"{self.dataset.name!r} has no record numbers: read it with pieces()")
        return self._here()

    def _here(self) -> Holdings:
        """What this process holds."""
        if self._pid != _Process.pid:
            raise UsageError(
                f"{self.dataset.name!r} belongs to process {self._pid}, not to its child "
                f"{_Process.pid}: what a child reads would be missing in the parent's checkpoints. "
                "Make a DataShards in the child, or use holdfast.torch.data.ShardedLoader"
            )
        return self.holdings


def _kind(
    size: int | None,
    files: Files | None,
    partitions: Mapping[str, tuple[int, int | None]] | None,
    listed: Sequence[tuple[str, int]] | None,
) -> tuple[str, tuple[Extent, ...]]:
    """The kind of the dataset, and its files or partitions."""
    given = [value for value in (size, files, partitions, listed) if value is not None]
    if len(given) != 1:
        raise UsageError(
            "a dataset has either a size, or files, or partitions, or listed shards, "
            f"not {len(given)} of them"
        )
    if files is not None:
        paths = [os.path.abspath(os.fspath(path)) for path in files]
        return LINES, tuple(Extent(path, os.stat(path).st_size) for path in paths)
    if partitions is not None:
        return STREAM, tuple(
            Extent(name, -1 if end is None else end - begin, begin)
            for name, (begin, end) in partitions.items()
        )
    return (RANGE if size is not None else LISTED), ()
