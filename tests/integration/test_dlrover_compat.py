# SPDX-License-Identifier: Apache-2.0
"""A script that imports only `dlrover.*` trains under `dlrover-run`, and goes on after a kill."""

import torch

from tests.integration.jobs import ROOT, SCRIPTS, Jobs

COMPAT = ROOT / "packages" / "dlrover-compat" / "src"


def test_a_script_written_for_dlrover_goes_on_after_a_kill(jobs: Jobs) -> None:
    path = f"{COMPAT}:{ROOT / 'src'}"
    script = str(SCRIPTS / "from_dlrover.py")
    job = jobs.start("dlrover-run", "--nproc_per_node=2", script, PYTHONPATH=path, HOST_PORTS="1")
    job.succeeds()
    assert job.count("not read by Holdfast: HOST_PORTS") == 1
    loaded = [(event.round, event.step) for event in jobs.events("loaded")]
    assert sorted(loaded) == [(1, 0), (1, 0), (2, 5), (2, 5)]
    assert len(jobs.events("done")) == 2
    # On storage as DLRover has it, and what it holds is the model of the last step.
    saves = jobs.folder / "saves"
    assert (saves / "dlrover_latest.txt").read_text() == "8"
    saved = torch.load(saves / "8" / "rank_0.pt", weights_only=True)
    final = torch.load(jobs.folder / "model.pt", weights_only=True)
    assert saved["step"] == 8
    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in final.items())
    jobs.expect_nothing_left()


def test_a_master_by_hand_names_the_variables_that_it_does_not_read(jobs: Jobs) -> None:
    master = jobs.master(HOST_PORTS="1,2", DLROVER_LOG_LEVEL="INFO")
    said = [line for line in master.err if "not read by Holdfast" in line]
    assert len(said) == 1
    assert said[0].endswith("HOST_PORTS (docs/from-dlrover.md#variables)")


def test_nodes_that_are_started_by_hand_find_their_master_and_rank(jobs: Jobs) -> None:
    """By the prior art's variables alone; the second one to be started asks for the first slot."""
    master = jobs.master()
    where = {"DLROVER_MASTER_ADDR": master.address, "HOLDFAST_TOKEN_FILE": str(master.token_file)}
    script = str(SCRIPTS / "steps.py")
    nodes = [
        jobs.run("--nnodes=2", script, NODE_RANK=rank, STEPS_NODE=f"node-{rank}", **where)
        for rank in ("1", "0")
    ]
    ranks = {event.node: event.rank for event in jobs.wait_world(2)}
    assert ranks == {"node-0": 0, "node-1": 1}
    jobs.finish()
    for node in nodes:
        node.succeeds()
