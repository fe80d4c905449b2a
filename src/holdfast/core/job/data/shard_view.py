# SPDX-License-Identifier: Apache-2.0
"""A dataset as people see it: how far it is, how fast it goes, which node has what."""

from itertools import islice

from msgspec.structs import asdict

from holdfast.core.job.data.dataset_state import DatasetState
from holdfast.model.dataset import Piece

WINDOW_S = 10.0
SHOWN_MAX = 100
"""Leases and pieces that are listed one by one; the rest is only counted."""


class Rate:
    """Samples per second over the last one to two windows."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._before = self._now = 0

    def add(self, samples: int, now: float) -> None:
        self._turn(now)
        self._now += samples

    def per_s(self, now: float) -> float:
        self._turn(now)
        window_s = now - self._began + WINDOW_S
        return (self._before + self._now) / window_s

    def _turn(self, now: float) -> None:
        windows = int((now - self._began) / WINDOW_S)
        if windows:
            self._before = self._now if windows == 1 else 0
            self._now = 0
            self._began += windows * WINDOW_S


def describe(dataset: DatasetState, rate: Rate | None, now: float) -> dict[str, object]:
    """For /api/v1 and `holdfast data`. Samples are counted in the dataset's own units: records,
    bytes of lines, offsets; -1 where it cannot be known."""
    what, epoch = dataset.dataset, dataset.epoch
    leases = [lease for live in dataset.live.values() for lease in live.values()]
    pieces = [piece for piece in dataset.open if piece.epoch == epoch]
    out = sum(lease.piece.end - lease.reported for lease in leases) + sum(map(_length, pieces))
    size = dataset.cutter.size
    per_s = 0.0 if rate is None else rate.per_s(now)
    aside = sum(_length(piece) for piece in dataset.aside if piece.epoch == epoch)
    cut = dataset.cutter.size_cut if epoch == dataset.cutter.epoch else size
    consumed = cut - out - aside
    left_s = (size - consumed - aside) / per_s if size >= 0 and per_s > 0 else -1.0
    return {
        "name": what.name,
        "kind": what.kind,
        "task": what.task,
        "follows": what.series,
        "epoch": epoch,
        "epochs": what.epochs,
        "is_over": what.epochs > 0 and dataset.first_left >= what.epochs,
        "consumed": consumed,
        "size": size,
        "per_s": round(per_s, 3),
        "epoch_left_s": round(left_s, 1),
        "leases": [
            {
                "number": lease.number,
                "node_id": lease.node_id,
                "round": lease.scope,
                "piece": _piece(lease.piece),
                "consumed": lease.reported - lease.piece.begin,
            }
            for lease in leases[:SHOWN_MAX]
        ],
        "leases_total": len(leases),
        "open": [_piece(piece) for piece in reversed(dataset.open[-SHOWN_MAX:])],
        "open_total": len(dataset.open),
        "set_aside": [
            {**_piece(piece), "why": why} for piece, why in islice(dataset.aside.items(), SHOWN_MAX)
        ],
        "set_aside_total": len(dataset.aside),
        "problem": dataset.problem,
    }


def _length(piece: Piece) -> int:
    return piece.end - piece.begin


def _piece(piece: Piece) -> dict[str, int]:
    return asdict(piece)
