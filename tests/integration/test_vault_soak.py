# SPDX-License-Identifier: Apache-2.0
"""Random kills of everything in a training without torch, whose new nodes are there at once."""

import pytest

from tests.integration.jobs import SCRIPTS, Command, Jobs
from tests.integration.soak import KILLS, SEED, Soak

WORKERS = 2


@pytest.mark.timeout(480 + 60 * KILLS)
def test_every_load_gives_what_was_saved(jobs: Jobs) -> None:
    """In one step on all ranks, and never an older one than the last that was committed."""
    # With its state in a folder the same command goes on with the job after everything was killed.
    shape = ("--local-nodes", "2", "--nproc-per-node", str(WORKERS), "--max-restarts", "1000")
    words = (*shape, "--job", "soak", "--state", str(jobs.folder / "state"))
    env = {
        "VAULT_DIRECTORY": str(jobs.folder / "saves"),
        "VAULT_EVERY": "10",
        "VAULT_KEEP": "3",
        "VAULT_SLOTS": "3",
        "VAULT_SHARED": str(SEED & 1),
        "VAULT_PARITY" if SEED & 2 else "VAULT_REPLICAS": "2" if SEED & 2 else "1",
        "HOLD": "5",
    }

    def begin() -> Command:
        return jobs.run(*words, str(SCRIPTS / "vaulted.py"), **env)

    soak = Soak(jobs, begin, world=2 * WORKERS, unsealed=0)
    soak.strike_all()
    jobs.finish()
    soak.job.succeeds()
    jobs.expect_nothing_left()
    print(soak.told())
