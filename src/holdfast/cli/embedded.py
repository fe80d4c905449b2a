# SPDX-License-Identifier: Apache-2.0
"""A master as a child of `holdfast run`: started again on the same state whenever it dies."""

import asyncio
import contextlib
import math
import os
import signal
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
from holdfast.runtime.observe import Level, Say
from holdfast.runtime.private import read_private
from holdfast.runtime.settings import environment
from holdfast.runtime.signals import end_signals_held
from holdfast.runtime.token import make_token

EXIT_JOB_FAILED = 5
"""Exit code of an embedded master whose job failed; the master itself was able to serve."""

EXIT_BROKE_OFF = 6
"""Exit code of a master that has served, and cannot go on: another one can."""

EXIT_STATE_AWAY = 7
"""Exit code of a master that served until its state was out of reach, which may pass."""

EXIT_STATE_SHUT = 8
"""Exit code of a master that could not begin for that reason."""

END_FILE = "end.json"
"""The file in the state directory that says how a failed job ended."""

END_BYTES_MAX = 16 << 20

DEATHS_MAX = 10
DEATHS_WINDOW_S = 60.0
STOP_S = 30.0
PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 5.0)
"""The pauses before each further try with a state that is out of reach; the last one repeats."""

SERVED_S = 10.0
"""If a master has served for this long before its state is out of reach, it is a new outage."""

REASON_BYTES_MAX = 4096
REMIND_S = 300.0
"""How often the same reason is repeated while a state is out of reach."""

AWAY = "starting it again until it can use its state: the workers go on meanwhile"


def is_end_of_job(code: int) -> bool:
    """Whether this exit code means that the job has ended, or was stopped (128 + the signal)."""
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
        # Output of masters and the agents they launch; all of them hold the other ends.
        self._out = Stream(None, console.out, "", is_worker=False)
        self._err = Stream(None, console.err, "", (-1, True), is_worker=False)
        self._lifeline, self._our_end = os.pipe2(os.O_CLOEXEC)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self.stopped_by: signal.Signals | None = None
        self._tries_until = math.inf
        self._wake = asyncio.Event()
        # Here a master writes why it cannot use its state, until it has served.
        self._reason = os.memfd_create("holdfast-reason", os.MFD_CLOEXEC)
        #: When each reason was logged last.
        self._said_at: dict[str, float] = {}
        self._command = [
            *(sys.executable, "-m", "holdfast.cli", "master"),
            *("--listen", self.address, "--state", str(state)),
            *("--lifeline", str(self._lifeline), "--reason", str(self._reason)),
            *arguments,
        ]

    def end(self) -> m.JobEnded:
        """How the job failed, as its last master wrote it."""
        written = read_private(self._state / END_FILE, END_BYTES_MAX)
        return msgspec.json.decode(written, type=m.JobEnded)

    @property
    def pid(self) -> int:
        """The pid of the present master; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    async def run(self) -> int:
        """Run masters; returns the exit code of the last one. StateError if they only ever die.

        The last master is the one that ended the job, or stopped it, or could not begin. A job that
        must stop needs a master until then too: without one no checkpoint reaches storage.

        Once a master has served, a master whose state is out of reach is tried again for as long as
        it takes: the workers go on meanwhile, or are held by their lease. Once the job must stop,
        the tries end after the time that `terminate` allows.
        """
        loop = asyncio.get_running_loop()
        deaths: deque[float] = deque()
        code, has_served, tries = EXIT_STATE_SHUT, False, 0
        while not self._is_closed:
            began = loop.time()
            with end_signals_held():
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._out.worker_end,
                    stderr=self._err.worker_end,
                    env=environment(),
                    pass_fds=[self._lifeline, self._reason],
                    # A Ctrl-C is for the launcher, which then ends the job in order.
                    start_new_session=True,
                )
            leave_alone(self._process.pid)
            if self.stopped_by is not None:
                self._process.terminate()
            code = await _ended(self._process)
            reason = os.pread(self._reason, REASON_BYTES_MAX, 0).decode(errors="replace")
            is_away = code == EXIT_STATE_AWAY or (code == EXIT_STATE_SHUT and has_served)
            if self._is_closed or (code >= 0 and code != EXIT_BROKE_OFF and not is_away):
                if code == EXIT_STATE_SHUT:
                    self._say(reason, Level.ERROR)
                return code
            # If a signal ended it before it served, the user is still there to stop the job.
            has_served = True
            if not reason or (is_away and loop.time() - began > SERVED_S):
                tries = 0  # It has served, longer than until its first write to the journal.
            if is_away:
                self._tell_why(reason, tries, loop.time())
                if loop.time() >= self._tries_until:
                    self._say(
                        "the job ends without its master: what was only in memory is lost",
                        Level.WARNING,
                    )
                    return code
                await self._pause(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                tries += 1
                continue
            how = f"by signal {-code}" if code < 0 else "by an error, see above"
            now = loop.time()
            deaths.append(now)
            while deaths[0] < now - DEATHS_WINDOW_S:
                deaths.popleft()
            if len(deaths) > DEATHS_MAX:
                raise StateError(
                    f"the master died {len(deaths)} times within {DEATHS_WINDOW_S:g} s, last {how}"
                )
            self._say(f"the master was ended {how}; starting it again", Level.WARNING)
        return code

    def _tell_why(self, reason: str, tries: int, now: float) -> None:
        """Say why the master cannot go on: at first, on every new reason, and now and then."""
        if tries == 0:
            self._said_at.clear()
            self._say(f"the master was ended: {reason}; {AWAY}", Level.WARNING)
        elif now < self._said_at.get(reason, -math.inf) + REMIND_S:
            return
        else:
            self._say(f"the master still cannot use its state: {reason}", Level.WARNING)
        self._said_at[reason] = now

    async def _pause(self, seconds: float) -> None:
        """Wait for this time, or until the job must stop, or until this is closed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()

    def terminate(self, number: signal.Signals, grace_s: float) -> None:
        """Make the master stop the job: it goes on with the next launcher on the same state.

        The master gets SIGTERM, whatever signal the user sent: a second SIGINT would mean something
        else. A master that is away meanwhile may come back within `grace_s`.
        """
        if self.stopped_by is not None:
            return
        self.stopped_by = number
        self._tries_until = asyncio.get_running_loop().time() + grace_s
        self._wake.set()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def hurry(self) -> None:
        """Make the master and every agent that it launched end at once."""
        if not self._is_closed:
            lifeline.hurry(self._our_end)

    async def stop(self) -> None:
        """End the master and, through the lifeline, every agent it launched."""
        self._is_closed = True
        self._wake.set()
        os.close(self._our_end)
        os.close(self._lifeline)
        if self._process is not None:
            try:
                await asyncio.wait_for(_ended(self._process), STOP_S)
            except TimeoutError:
                self._process.kill()
                await _ended(self._process)
        os.close(self._reason)
        self._out.close()
        self._err.close()
        self._port.close()


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a child, awaited through its pidfd.

    Not asyncio's own subprocesses: these need SIGCHLD, which belongs to the agent in this process.
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
