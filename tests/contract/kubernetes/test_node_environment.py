# SPDX-License-Identifier: Apache-2.0
"""What an agent in a pod makes of what the platform tells it."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.model.errors import UsageError
from holdfast.runtime.settings import node_settings
from holdfast.runtime.token import make_token, read_token
from tests.integration.jobs import SCRIPTS, Jobs, playground


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with playground() as jobs:
        yield jobs


def test_the_pods_address_counts_where_a_platform_gave_it() -> None:
    in_pod = node_settings(
        {"HOLDFAST_NODE_ID": "7", "POD_IP": "10.0.0.7", "HOLDFAST_GRACE_S": "120"}
    )
    assert (in_pod.node_id, in_pod.address, in_pod.leave_s) == (7, "10.0.0.7", 120.0)
    # In a pod that somebody else made, the variable may mean anything.
    elsewhere = node_settings({"POD_IP": "10.0.0.7"})
    assert (elsewhere.node_id, elsewhere.address, elsewhere.leave_s) == (-1, "", 0.0)


def test_a_node_is_gone_before_its_platform_loses_patience(jobs: Jobs) -> None:
    """A weakness of the prior art: pods lose their grace period, and are killed while they save.

    The workers get at most half of the time, whatever --grace says: what is in memory needs some.
    """
    master = jobs.master()
    node = jobs.node(
        master, "--grace", "600", str(SCRIPTS / "stubborn.py"), HOLDFAST_GRACE_S="4"
    )  # fmt: skip
    jobs.wait_for("main")
    node.send(signal.SIGTERM)
    assert node.wait() == 128 + signal.SIGTERM
    master.wait_line("node rank 0 is lost: this node was stopped by SIGTERM")


def test_a_token_that_others_can_read_is_refused_unless_its_mount_is_read_only(
    tmp_path: Path,
) -> None:
    """A Secret in a pod must be readable for a user whom nobody knew when it was mounted."""
    token_file = tmp_path / "token"
    token = make_token(token_file)
    token_file.chmod(0o444)
    with pytest.raises(UsageError, match="open to other users"):
        read_token(token_file)
    read = "from pathlib import Path; from holdfast.runtime.token import read_token"
    script = (
        f'mount --bind -o ro "{tmp_path}" "{tmp_path}" && mount -o remount,bind,ro "{tmp_path}" && '
        f"exec '{sys.executable}' -c '{read}; print(read_token(Path(\"{token_file}\")).decode())'"
    )
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"this machine allows no mounts: {done.stderr.strip()}")
    assert done.stdout.strip().encode() == token, done.stderr
