# SPDX-License-Identifier: Apache-2.0
"""A picture of predicted goodput: over time, by policy, and against each knob."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.model.errors import UsageError
from holdfast.sim.failures import DAY_S
from holdfast.sim.prediction import Prediction, lost_share, uses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")

Curve = Sequence[tuple[float, float]]
"""Pairs: (value of the knob, goodput)."""


def check(path: Path) -> None:
    """Report early what prevents a picture."""
    if path.suffix not in FORMATS:
        raise UsageError(f"a picture is a {' or '.join(FORMATS)} file, not {path.name!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise UsageError("a picture needs matplotlib: pip install 'holdfast[sim]'") from exc


def draw(
    path: Path, title: str, predictions: Mapping[str, Prediction], curves: Mapping[str, Curve]
) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(3, len(curves))
    _over_time(figure.add_subplot(grid[0, :]), predictions)
    _lost(figure.add_subplot(grid[1, :]), predictions)
    for column, (knob, curve) in enumerate(curves.items()):
        axes = figure.add_subplot(grid[2, column])
        axes.plot([value for value, _ in curve], [share for _, share in curve], marker="o")
        axes.set_xlabel(knob)
        axes.set_ylabel("goodput")
        axes.grid(alpha=0.3)
    # Without a date in it, the same seed gives the same file.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _over_time(axes: "Axes", predictions: Mapping[str, Prediction]) -> None:
    for name, prediction in predictions.items():
        days = [at_s / DAY_S for at_s, _ in prediction.sliding]
        shares = [share for _, share in prediction.sliding]
        axes.plot(days, shares, linewidth=0.6, label=f"{name}: {prediction.goodput:.1%}")
    axes.set_xlabel("days")
    axes.set_ylabel("goodput of the last hour")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower left")


def _lost(axes: "Axes", predictions: Mapping[str, Prediction]) -> None:
    names = list(predictions)
    left = [0.0] * len(names)
    for use in uses():
        shares = [lost_share(prediction, use) for prediction in predictions.values()]
        if max(shares) < 1e-4:
            continue
        axes.barh(names, shares, left=left, label=use)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axes.set_xlabel("share of the time lost to")
    axes.invert_yaxis()
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
