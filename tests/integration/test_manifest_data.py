# SPDX-License-Identifier: Apache-2.0
"""The positions of data in the manifests of checkpoints."""

import json
from pathlib import Path

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.data_position import DataPiece, DataPosition
from holdfast.checkpoint.manifest import MANIFEST, list_committed
from holdfast.checkpoint.storage import open_storage
from holdfast.model.checkpoint import Series, Version
from holdfast.model.dataset import Piece, Position
from holdfast.protocol.checkpoints import CommitOrder
from tests.storages import make_state, order_for, save, write_state
from tests.wire.checkpoint_samples import POSITION

V1 = Version(3, 100)


def test_a_position_comes_back_as_it_went(tmp_path: Path) -> None:
    """The sample has a value in every field: none is forgotten on the way."""
    defaults = Position("x", 0, ())
    names = Position.__struct_fields__
    assert all(getattr(POSITION, name) != getattr(defaults, name) for name in names)
    series = Series(f"{tmp_path}/c")
    storage = open_storage(series.directory)
    entries = write_state(storage, series, V1, make_state(1), "a1", tmp_path)
    order = order_for(series, V1, "a1", entries)
    plain = Position("plain", epoch=2, cut=(7,))
    both = (POSITION, plain)
    commit(
        storage,
        series,
        CommitOrder(order.directory, order.version, order.shape, "a1", entries, both),
    )
    (committed,) = list_committed(storage, series)
    assert committed.stored.positions == both
    raw = storage.get(f"{series.name(100)}/{MANIFEST}")
    assert raw is not None
    data = json.loads(raw)["data"]
    assert data[0]["open"] == [{"epoch": 1, "extent": 0, "begin": 5, "end": 10}]
    assert data[0]["listed"] == [{"name": "ü.tar", "samples": 1000}]
    assert data[1] == {"name": "plain", "epoch": 2, "cut": [7]}


def test_a_manifest_without_data_says_nothing_of_it(tmp_path: Path) -> None:
    """It is, byte for byte, one of before there were positions: those are read as well."""
    series = Series(f"{tmp_path}/c")
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    raw = storage.get(f"{series.name(100)}/{MANIFEST}")
    assert raw is not None
    assert list(json.loads(raw))[-2:] == ["files", "checksum"]
    (committed,) = list_committed(storage, series)
    assert committed.stored.positions == ()


def test_whatever_a_position_has_the_manifest_has() -> None:
    assert DataPosition.__struct_fields__ == Position.__struct_fields__
    assert DataPiece.__struct_fields__ == Piece.__struct_fields__
