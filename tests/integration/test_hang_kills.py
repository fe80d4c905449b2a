# SPDX-License-Identifier: Apache-2.0
"""Workers that live and make no step any more: nothing stopped them, and nothing else would end it.

The prior art waited for NCCL's ten minutes, or marked the job as failed without restarting it.
"""

from tests.integration.control import observe
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs, MasterCommand
from tests.waiting import until

STUCK = str(SCRIPTS / "stuck.py")
PATIENCE = ("--beat", "0.3", "--silence", "30", "--lease", "60")
HEARD_STEPS = 20


def two_nodes(jobs: Jobs, master: MasterCommand, **env: str) -> list[Command]:
    options = ("--nnodes", "2", STUCK)
    return [jobs.node(master, *options, name=name, **env) for name in ("a", "b")]


def wait_heard(master: MasterCommand) -> None:
    """Until the master has heard of steps."""
    until(lambda: observe(master)["progress"]["step"] >= HEARD_STEPS, LIMIT_S, "its steps")


def test_a_worker_that_sleeps_inside_a_step_is_found_by_missing_progress(jobs: Jobs) -> None:
    master = jobs.master(*PATIENCE, "--hang-after", "10")
    nodes = two_nodes(jobs, master, STUCK="1")
    wait_heard(master)
    jobs.go()
    (stuck,) = jobs.wait_for("stuck")
    jobs.wait_world(2, after=[stuck])
    assert min(event.step for event in jobs.steps(round=2)) == stuck.step
    master.wait_line(
        r"round 1 is over: no worker has made a step for \d+ s, where 10 s are allowed"
    )
    until(lambda: observe(master)["progress"]["incidents"][0]["closed"], LIMIT_S, "an end of it")
    view = observe(master)
    assert set(view["restarts"]) == {"stalled"}
    assert view["progress"]["incidents"][0]["stages"]["detect"] > 10.0
    jobs.finish()
    for node in nodes:
        node.succeeds()
    jobs.expect_nothing_left()


def test_a_pause_that_is_allowed_restarts_nobody(jobs: Jobs) -> None:
    """Longer than beats, steps and the pauses so far; shorter than a young job may pause."""
    master = jobs.master(*PATIENCE)
    nodes = two_nodes(jobs, master, STUCK="0", PAUSE="4")
    wait_heard(master)
    jobs.go()
    (stuck,) = jobs.wait_for("stuck")
    jobs.wait_for("step", lambda event: event.step > stuck.step, count=4)
    jobs.finish()
    for node in nodes:
        node.succeeds()
    assert {event.round for event in jobs.events()} == {1}
    jobs.expect_nothing_left()


def test_rank_0_is_no_exception_and_the_embedded_master_gets_the_flag(jobs: Jobs) -> None:
    job = jobs.run("--local-nodes", "2", "--hang-after", "10", STUCK, STUCK="0")
    jobs.wait_for("step", lambda event: event.step >= HEARD_STEPS, count=2)
    jobs.go()
    job.wait_line("round 1 is over: no worker has made a step for .* where 10 s are allowed")
    jobs.wait_for("step", lambda event: event.round == 2, count=2)
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()
