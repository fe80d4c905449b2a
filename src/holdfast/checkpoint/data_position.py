# SPDX-License-Identifier: Apache-2.0
"""The position of a dataset as it stands in a manifest: with a name for everything, for people."""

from msgspec import Struct

from holdfast.model.dataset import Piece, Position

_NUMBER_MAX = 2**63 - 1


class DataPiece(Struct, frozen=True):
    """Samples from `begin` to before `end`; see model/dataset.py for what they are."""

    epoch: int
    extent: int
    begin: int
    end: int

    @staticmethod
    def of(piece: Piece) -> "DataPiece":
        return DataPiece(piece.epoch, piece.extent, piece.begin, piece.end)

    def piece(self) -> Piece:
        """As the rest of the program knows it."""
        return Piece(self.epoch, self.extent, self.begin, self.end)


class DataShard(Struct, frozen=True):
    """A shard that the user named."""

    name: str
    samples: int


class DataPosition(Struct, frozen=True, omit_defaults=True):
    """What of a dataset is consumed: all that was cut, except what is open."""

    name: str
    epoch: int
    cut: tuple[int, ...]
    open: tuple[DataPiece, ...] = ()
    aside: tuple[DataPiece, ...] = ()
    listed: tuple[DataShard, ...] = ()
    first_listed: int = 0
    is_listed: bool = False
    recipe: str = ""

    @staticmethod
    def of(position: Position) -> "DataPosition":
        return DataPosition(
            name=position.name,
            epoch=position.epoch,
            cut=position.cut,
            open=tuple(DataPiece.of(piece) for piece in position.open),
            aside=tuple(DataPiece.of(piece) for piece in position.aside),
            listed=tuple(DataShard(name, samples) for name, samples in position.listed),
            first_listed=position.first_listed,
            is_listed=position.is_listed,
            recipe=position.recipe,
        )

    def wrong(self) -> str:
        """The first impossible value in it, whatever the dataset is; empty if there is none."""
        numbers = [self.epoch, self.first_listed, *self.cut, *(one.samples for one in self.listed)]
        for piece in (*self.open, *self.aside):
            numbers += [piece.epoch, piece.extent, piece.begin, piece.end]
            if piece.begin > piece.end:
                return f"data from {piece.begin} to {piece.end}"
        for number in numbers:
            if not 0 <= number <= _NUMBER_MAX:
                return f"the number {number} in a position of its data"
        return ""

    def position(self) -> Position:
        """As the rest of the program knows it."""
        return Position(
            name=self.name,
            epoch=self.epoch,
            cut=self.cut,
            open=tuple(entry.piece() for entry in self.open),
            aside=tuple(entry.piece() for entry in self.aside),
            listed=tuple((entry.name, entry.samples) for entry in self.listed),
            first_listed=self.first_listed,
            is_listed=self.is_listed,
            recipe=self.recipe,
        )
