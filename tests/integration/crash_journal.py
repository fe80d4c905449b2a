# SPDX-License-Identifier: Apache-2.0
"""A master that ends itself with SIGKILL right before or right after its k-th commit.

`python -m tests.integration.crash_journal before|after K JOB HOST:PORT STATE`. Everything else is
the real master. A commit is what the journal makes durable together, so these are all the moments
between which a death makes a difference to the next master.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from holdfast.master.process import MasterSettings, run_master
from holdfast.model.job import JobSpec
from holdfast.ports.journal import Entry, Journal
from holdfast.runtime.journal import SqliteJournal
from holdfast.runtime.observe import sayer
from tests.integration.control import JOB
from tests.integration.jobs import ROOT, Command, Jobs


class CrashingJournal:
    """The real journal, and a sudden death at one of its commits."""

    def __init__(self, journal: Journal, side: str, at: int) -> None:
        self._journal = journal
        self._side = side
        self._at = at
        self._commits = 0

    def load(self) -> list[Entry]:
        return self._journal.load()

    def end(self) -> int:
        return self._journal.end()

    def since_snapshot(self) -> tuple[int, int]:
        return self._journal.since_snapshot()

    def append(self, entries: Sequence[Entry]) -> None:
        self._commits += 1
        if self._commits == self._at and self._side == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self._journal.append(entries)
        if self._commits == self._at and self._side == "after":
            os.kill(os.getpid(), signal.SIGKILL)

    def compact(self, snapshot: Sequence[Entry]) -> None:
        self._journal.compact(snapshot)

    def close(self) -> None:
        self._journal.close()


def crashing_master(jobs: Jobs, side: str, at: int, address: str, state: Path) -> Command:
    """Start this module as the master of a job."""
    words = (side, str(at), JOB, address, str(state))
    argv = [sys.executable, "-m", "tests.integration.crash_journal", *words]
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    command = Command(argv, jobs.environment(PYTHONPATH=path), jobs.folder)
    jobs.commands.append(command)
    return command


def main(side: str, at: str, job: str, address: str, state: str) -> int:
    settings = MasterSettings(
        job=job,
        listen=address,
        state=Path(state),
        token_file=None,
        http="",
        tls_cert=None,
        tls_key=None,
        insecure=False,
        spec=JobSpec(),
    )

    def open_journal(given: MasterSettings) -> Journal:
        return CrashingJournal(SqliteJournal.open(given.state, job=given.job), side, int(at))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        say = sayer("master")
        end = runner.run(run_master(settings, say=say, announce=say, open_journal=open_journal))
    return 0 if end.ok else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
