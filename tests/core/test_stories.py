# SPDX-License-Identifier: Apache-2.0
"""What the master tells, for programs too: a sentence leads to its node, round and incident."""

from holdfast.core.job import events as ev
from holdfast.master.stories import describe_progress, fields_of, tell
from holdfast.model.checkpoint import Version
from holdfast.model.ids import NodeId, NodeRank, Round
from holdfast.model.node import ExitReason
from tests.core.harness import running_pair


def test_a_story_says_what_it_is_about() -> None:
    lost = ev.NodeLost(NodeId(7), NodeRank(3), ExitReason.LOST, "it went silent", proven=False)
    assert fields_of(lost) == {"node_id": 7, "node_rank": 3}
    closed = ev.IncidentClosed(Round(4), "why", 0.5, 0.0, 0.1, 0.2, number=9)
    assert fields_of(closed) == {"round": 4, "incident": 9}
    committed = ev.CheckpointCommitted("/ckpt", Version(1, 500), "x-1")
    assert fields_of(committed) == {"directory": "/ckpt", "step": 500}
    assert "step 500 is committed" in tell(committed)


def test_before_the_first_step_the_line_of_status_has_no_goodput() -> None:
    job = running_pair()
    view = {"job": "j", **job.machines.view(5.0)}
    assert describe_progress(view) == "j: round 1, 2 nodes, 2 workers, step 0"
    job.beat("a", at=9.0, round=1, steps=3, step=2, first=2.0, last=0.0)
    view = {"job": "j", **job.machines.view(9.0)}
    assert "goodput" in describe_progress(view)
