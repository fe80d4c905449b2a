# SPDX-License-Identifier: Apache-2.0
"""The prior art's variables: read on nodes that are started by hand, or named in one line."""

from collections.abc import Callable, Mapping

import pytest

from holdfast.cli.dlrover_run import parse_dlrover_run
from holdfast.cli.run_options import RunOptions, parse_run

Parse = Callable[..., RunOptions]
BOTH = pytest.mark.parametrize("command", [parse_run, parse_dlrover_run])


def parse(command: Parse, *argv: str, env: Mapping[str, str]) -> RunOptions:
    return command([*argv, "train.py"], env, cpus=2, accelerators=0)


@BOTH
@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({}, ""),
        ({"HOST_PORTS": "1,2"}, "HOST_PORTS"),
        ({"HOST_PORTS": ""}, ""),
        ({"DLROVER_LOG_DIR": "/x", "DLROVER_EVENT_X": "1"}, "DLROVER_EVENT_X, DLROVER_LOG_DIR"),
        ({"PET_NNODES": "1", "PET_NODES": "1"}, "PET_NODES"),
        (
            {"XPU_TIMER_PORT": "18888", "TRAINING_LOG_FILE": "f"},
            "TRAINING_LOG_FILE, XPU_TIMER_PORT",
        ),
        ({"MONITOR_ENABLED": "true"}, ""),
        ({"MONITOR_ENABLED": "false"}, "MONITOR_ENABLED"),
        ({"DLROVER_MASTER_ADDR": "h:1", "HOLDFAST_NODE_ID": "3", "HOLDFAST_MASTER": "m:1"}, ""),
        ({"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1", "MY_DLROVER_X": "1"}, ""),
    ],
)
def test_what_nothing_reads_is_named_in_one_line(
    command: Parse, env: dict[str, str], named: str
) -> None:
    notes = parse(command, env=env).notes
    assert len(notes) == bool(named)
    if named:
        assert f": {named} (docs/from-dlrover.md#variables)" in notes[0]
        assert "\n" not in notes[0]


@BOTH
@pytest.mark.parametrize(
    ("argv", "env", "master", "rank"),
    [
        ([], {"DLROVER_MASTER_ADDR": "d:1", "NODE_RANK": "2"}, "d:1", 2),
        ([], {"DLROVER_MASTER_ADDR": "d:1", "WORKER_RANK": "3"}, "d:1", 3),
        ([], {"DLROVER_MASTER_ADDR": "d:1", "NODE_RANK": "2", "WORKER_RANK": "3"}, "d:1", 2),
        ([], {"DLROVER_MASTER_ADDR": "d:1", "HOLDFAST_MASTER": "h:1"}, "h:1", None),
        ([], {"HOLDFAST_MASTER": "h:1", "PET_NODE_RANK": "1", "NODE_RANK": "2"}, "h:1", 1),
        (["--master", "c:1", "--node-rank", "0"],
         {"DLROVER_MASTER_ADDR": "d:1", "HOLDFAST_MASTER": "h:1", "NODE_RANK": "2"}, "c:1", 0),
        # A platform of ours sets both names, and numbers the nodes in the master.
        ([], {"HOLDFAST_NODE_ID": "7", "HOLDFAST_MASTER": "h:1", "NODE_RANK": "2"}, "h:1", None),
        ([], {"NODE_RANK": "2"}, None, None),
    ],
)  # fmt: skip
def test_a_node_that_is_started_by_hand(
    command: Parse, argv: list[str], env: dict[str, str], master: str | None, rank: int | None
) -> None:
    options = parse(command, "--nnodes", "1", *argv, env=env)
    assert (options.master, options.node_rank) == (master, rank)


@BOTH
def test_which_master_it_is_is_said(command: Parse) -> None:
    env = {"DLROVER_MASTER_ADDR": "d:1"}
    assert parse(command, env=env).notes == (
        "DLROVER_MASTER_ADDR d:1 is taken as the address of --master",
    )
    options = parse(command, "--local-nodes", "2", env=env)
    assert options.master is None
    assert [entry.option for entry in options.ignored] == ["DLROVER_MASTER_ADDR"]
    assert not options.notes
