# SPDX-License-Identifier: Apache-2.0
"""A real master whose journal is older than what its agents know, or gone: what people see."""

import shutil

from tests.integration.control import wait_held
from tests.integration.jobs import SCRIPTS, Jobs, MasterCommand, wait_gone

WORDS = ("--nproc-per-node", "2", "--no-spares", str(SCRIPTS / "awaits.py"))


def restarted(jobs: Jobs, master: MasterCommand) -> MasterCommand:
    """Another master for the same job, at the same address."""
    return jobs.master("--http", "off", listen=master.address)


def test_an_older_copy_of_the_journal_ends_the_job_in_plain_words(jobs: Jobs) -> None:
    """Known as a lost fsync: the prior art would go on from the old state, or hang."""
    state, copy = jobs.folder / "state", jobs.folder / "older"
    master = jobs.master("--http", "off")
    node = jobs.node(master, *WORDS)
    jobs.wait_for("awaits")
    wait_held(master)
    master.kill()
    shutil.copytree(state, copy)
    master = restarted(jobs, master)
    # The agent asks again only when it was let in: it has been told of this master by then.
    wait_held(master)
    master.kill()
    shutil.rmtree(state)
    shutil.copytree(copy, state)
    master = restarted(jobs, master)
    assert master.wait() == 1
    assert node.wait() == 1
    for said in (master.text, node.text):
        assert "the journal of the master is behind: the agent of node rank 0 was told" in said
        assert "start the job again" in said
    workers = jobs.events("main")
    assert len(workers) == 2, "nobody was started again"
    wait_gone(worker.pid for worker in workers)


def test_a_new_state_directory_begins_another_job_and_the_old_agent_is_told(jobs: Jobs) -> None:
    state = jobs.folder / "state"
    master = jobs.master("--http", "off")
    node = jobs.node(master, *WORDS)
    jobs.wait_for("awaits")
    wait_held(master)
    token = master.token_file.read_bytes()
    master.kill()
    shutil.rmtree(state)
    state.mkdir(mode=0o700)
    master.token_file.write_bytes(token)
    master.token_file.chmod(0o600)
    master = restarted(jobs, master)
    assert node.wait() == 1
    assert "the journal of this node's master is lost: the job starts anew" in node.text
    wait_gone(worker.pid for worker in jobs.events("main"))
    jobs.finish()
    jobs.node(master, *WORDS).succeeds()
    master.succeeds()
