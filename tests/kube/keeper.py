# SPDX-License-Identifier: Apache-2.0
"""One cluster for all processes of a test run, because each costs 450 MB and seconds of CPU.

Whoever needs it first starts a keeper, the parent of the servers. Every user holds a shared lock;
the keeper waits for the exclusive one, which it gets when the last user is gone, however that
ended, and then takes the servers with it.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kube.cluster import START_S, Cluster, own_cluster
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def shared_cluster() -> Iterator[Cluster]:
    """The cluster of this run. The folder for temporary files is what a run has in common."""
    folder = Path(tempfile.gettempdir()) / "kube"
    folder.mkdir(exist_ok=True)
    with open(folder / "users", "ab") as users:
        with open(folder / "starting", "ab") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            # Waits for a keeper that is about to end: it holds the lock to its last moment.
            fcntl.flock(users, fcntl.LOCK_SH)
            address = _read(folder) or _start_keeper(folder)
        yield Cluster(folder, address)


def keep(folder: Path) -> None:
    """Run a cluster for as long as somebody uses it."""
    ready = folder / "ready"
    with own_cluster(folder) as cluster, open(folder / "users", "ab") as users:
        temporary = ready.with_suffix(".tmp")
        temporary.write_text(cluster.address)
        temporary.replace(ready)
        fcntl.flock(users, fcntl.LOCK_EX)
        ready.unlink()
        cluster.stop()


def _start_keeper(folder: Path) -> str:
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with open(folder / "keeper.log", "ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.kube.keeper", str(folder)],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def address() -> str:
        if keeper.poll() is not None:
            raise AssertionError((folder / "keeper.log").read_text(errors="replace")[-4000:])
        return _read(folder)

    return until(address, 2 * START_S, "a cluster for this test run")


def _read(folder: Path) -> str:
    try:
        return (folder / "ready").read_text()
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    keep(Path(sys.argv[1]))
