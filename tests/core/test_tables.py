# SPDX-License-Identifier: Apache-2.0
"""What the commands print: nothing is cut on a narrow terminal, and no colours with NO_COLOR."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from holdfast.cli import data, sim, status
from holdfast.master.view import (
    CheckpointsView,
    DatasetView,
    IncidentView,
    JobView,
    NodeView,
    ProgressView,
    WorldView,
)

LOGS = "/scratch/somebody/experiments/2026-11/holdfast-logs/train-2f7c"

NODES = (
    NodeView(0, 0, "running", 1, "10.244.112.34", 8, True, 7.9, 123_400_000_000, 12.34, 12.3, LOGS),
    NodeView(1, 1, "running", 2, "gpu-node-17.cluster.example", 8, False, 0.0, 0, 0.01, 4.9, LOGS),
    NodeView(12, 2, "running", 3, "10.244.112.36", 8, None),
    NodeView(3, 3, "succeeded", 4, "10.244.112.37", 8),
)

JOB = JobView(
    "train-gpt-neox-20b-1a2b",
    "running",
    time_s=93_784.0,
    world=WorldView(3, 5, "running", "node rank 2 is lost: it went silent", (0, 1), 16, (2,)),
    nodes=NODES,
    progress=ProgressView(
        step=123_456,
        steps_total=130_000,
        steps_per_s=12.34,
        steps_wanted=1_000_000,
        left_s=71_030.0,
        stage="productive",
        seconds={"start": 20.0, "productive": 90_000.0, "rendezvous": 1.5, "restore": 12.0},
        goodput=0.973,
        incidents=(
            IncidentView(
                1,
                "rank 1 on node rank 0 was killed by SIGKILL",
                stages={"detect": 0.5, "rendezvous": 0.25, "restart": 0.125, "restore": 2.5},
                recovery_s=3.375,
                closed=True,
            ),
        ),
    ),
    checkpoints=(CheckpointsView("/scratch/somebody/checkpoints/train", 123_000, 123_456),),
)


def shown(width: int, job: JobView = JOB, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, **options)
    status.print_view(console, job, "127.0.0.1:43125")
    return out.getvalue()


def whole(text: str, width: int) -> None:
    for line in text.splitlines():
        assert len(line) <= width
        assert "…" not in line


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_of_the_status_is_cut(width: int) -> None:
    text = shown(width)
    whole(text, width)
    headings = ["state", "start", "cores", "memory", "steps/s", "beat", "host"]
    assert [line.split()[-7:] for line in text.splitlines() if "steps/s  " in line] == [headings]
    everything = "".join(text.split())
    for word in ("10.244.112.34", "gpu-node-17.cluster.example", LOGS, "123.4GB", "12.34"):
        assert word in everything


def test_the_status_has_the_speed_and_the_time_left() -> None:
    words = " ".join(shown(120).split())
    assert "step 123,456 of 1,000,000 (130,000 finished" in words
    assert "speed 12.3 steps/s, 19 h 43 min left" in words


@pytest.mark.parametrize(
    ("part", "now"), [("", "now restore for 12.0 s"), ("load", "now load for 12.0 s")]
)
def test_an_open_incident_says_what_it_is_at_and_for_how_long(part: str, now: str) -> None:
    stages = {"detect": 0.5, "rendezvous": 0.25, "restart": 0.125}
    incident = IncidentView(
        2,
        "node rank 1 was lost",
        round=3,
        at_s=100.0,
        stages=stages,
        recovery_s=75.0,
        stage="restore",
        part=part,
        stage_s=12.0,
        open_s=75.0,
    )
    job = JobView("train", "running", progress=ProgressView(incidents=(incident,)))
    text = " ".join(shown(120, job).split())
    assert "round 3: node rank 1 was lost" in text
    stages_shown = "detect 0.5, rendezvous 0.2, restart 0.1"
    assert f"not over after 1 min 15 s, {now}: {stages_shown}" in text
    assert "recovery 75" not in text


def test_each_log_folder_is_named_once() -> None:
    assert "".join(shown(60).split()).count(LOGS) == 1
    assert "logs: /scratch" in shown(120)


def test_columns_that_do_not_fit_side_by_side_come_below_each_other() -> None:
    names = ("ours", "flash", "torchrun", "manual")
    cells = {"goodput": "99.85%", "recovery, median of all": "1 h 36 min", "to": "0.2 GB/s"}
    for width, tables in ((60, 2), (120, 1)):
        out = io.StringIO()
        sim.print_cells(Console(file=out, width=width), dict.fromkeys(names, cells))
        whole(out.getvalue(), width)
        assert out.getvalue().count("goodput") == tables
        assert [name for name in names if name not in out.getvalue()] == []
        assert out.getvalue().count("1 h 36 min") == 4


def test_the_datasets_fit_60_columns() -> None:
    one = DatasetView(
        "a-corpus-with-a-long-name",
        epoch=1,
        epochs=3,
        consumed=1_234_567,
        size=9_999_999,
        per_s=12_345.6,
        epoch_left_s=4_000.0,
        leases_total=128,
    )
    out = io.StringIO()
    Console(file=out, width=60).print(data.table((one,)))
    whole(out.getvalue(), 60)
    assert "set aside" in out.getvalue()


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7]|4[0-8]|10[0-7])(?:;\d+)*m")


def test_no_color_is_honoured() -> None:
    environ = {"TERM": "xterm-256color"}
    assert COLOUR.search(shown(80, force_terminal=True, _environ=environ))
    text = shown(80, force_terminal=True, _environ={**environ, "NO_COLOR": "1"})
    assert "running" in text
    assert not COLOUR.search(text)
