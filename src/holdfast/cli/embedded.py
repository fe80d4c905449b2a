# SPDX-License-Identifier: Apache-2.0
"""A master as a child of `holdfast run`: started again on the same state whenever it dies."""

import asyncio
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.agent.children import leave_alone
from holdfast.agent.network import ReservedPort
from holdfast.agent.output import Stream
from holdfast.cli.console import Console
from holdfast.model.errors import StateError
from holdfast.protocol import messages as m
from holdfast.runtime import lifeline
from holdfast.runtime.observe import Say
from holdfast.runtime.settings import environment
from holdfast.runtime.signals import end_signals_held
from holdfast.runtime.token import make_token

EXIT_JOB_FAILED = 5
"""How an embedded master says that the job failed, and not that it could not serve."""

EXIT_BROKE_OFF = 6
"""How it says that it served, and cannot go on: another one can."""

END_FILE = "end.json"
"""In the state directory: how a failed job ended."""

DEATHS_MAX = 10
DEATHS_WINDOW_S = 60.0
STOP_S = 30.0


def is_end_of_job(code: int) -> bool:
    """Whether a master that exits so has ended the job, or has stopped it (128 + the signal)."""
    return code in (0, EXIT_JOB_FAILED) or code > 128


class EmbeddedMaster:
    """Keeps one master process alive until it ends by itself."""

    def __init__(self, arguments: Sequence[str], state: Path, console: Console, say: Say) -> None:
        # Held for the whole job, so that a restarted master gets the same port.
        self._port = ReservedPort()
        self.address = f"127.0.0.1:{self._port.number}"
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = state
        self.token_file = state / "token"
        make_token(self.token_file)
        self._say = say
        # What masters and the agents they launch print; all of them hold the other ends.
        self._out = Stream(None, console.out, "")
        self._err = Stream(None, console.err, "")
        self._lifeline, self._our_end = os.pipe2(os.O_CLOEXEC)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopping = self._is_closed = False
        self._command = [
            *(sys.executable, "-m", "holdfast.cli", "master"),
            *("--listen", self.address, "--state", str(state)),
            *("--lifeline", str(self._lifeline)),
            *arguments,
        ]

    def end(self) -> m.JobEnded:
        """How the job failed, as its last master wrote it down."""
        return msgspec.json.decode((self._state / END_FILE).read_bytes(), type=m.JobEnded)

    @property
    def pid(self) -> int:
        """Of the present master; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    async def run(self) -> int:
        """The exit code of the last master; StateError if it only ever dies.

        The last is the one that ended the job, or stopped it, or could not begin. Also a job that
        is to stop needs a master until then: without one no checkpoint reaches storage.
        """
        loop = asyncio.get_running_loop()
        deaths: deque[float] = deque()
        while True:
            with end_signals_held():
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._out.worker_end,
                    stderr=self._err.worker_end,
                    env=environment(),
                    pass_fds=[self._lifeline],
                    # A Ctrl-C is for the launcher, which then ends the job in order.
                    start_new_session=True,
                )
            leave_alone(self._process.pid)
            if self._is_stopping:
                self._process.terminate()
            code = await _ended(self._process)
            if self._is_closed or (code >= 0 and code != EXIT_BROKE_OFF):
                return code
            how = f"by signal {-code}" if code < 0 else "by an error, see above"
            now = loop.time()
            deaths.append(now)
            while deaths[0] < now - DEATHS_WINDOW_S:
                deaths.popleft()
            if len(deaths) > DEATHS_MAX:
                raise StateError(
                    f"the master died {len(deaths)} times within {DEATHS_WINDOW_S:g} s, last {how}"
                )
            self._say(f"the master was ended {how}; starting it again")

    def terminate(self) -> None:
        """Have the master stop the job: it goes on with the next launcher on the same state.

        By SIGTERM, whatever the user sent: a second SIGINT would mean something else.
        """
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def hurry(self) -> None:
        """Have the master and every agent that it launched end at once."""
        if not self._is_closed:
            lifeline.hurry(self._our_end)

    async def stop(self) -> None:
        """End the master and, through the lifeline, every agent it launched."""
        self._is_closed = True
        os.close(self._our_end)
        os.close(self._lifeline)
        if self._process is not None:
            try:
                await asyncio.wait_for(_ended(self._process), STOP_S)
            except TimeoutError:
                self._process.kill()
                await _ended(self._process)
        self._out.close()
        self._err.close()
        self._port.close()


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a child, awaited through its pidfd.

    Not asyncio's own subprocesses: those need SIGCHLD, which belongs to the agent in this process.
    """
    if process.returncode is not None:
        return process.returncode
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    pidfd = os.pidfd_open(process.pid)
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return process.wait()
