# SPDX-License-Identifier: Apache-2.0
"""A real master as a process of its own, to be asked, killed and started again by tests."""

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Self

from holdfast.client import AgentClient
from holdfast.runtime.token import read_token

START_S = 60.0
STOP_S = 30.0
ROOT = Path(__file__).resolve().parents[1]
ANNOUNCEMENT = "holdfast master listening on "


class Master:
    """`holdfast master` on a state directory. A restart keeps the port, as after a real crash."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"tcp:127.0.0.1:{self.port}"

    @property
    def token_file(self) -> Path:
        return self.state / "token"

    def start(self) -> Self:
        """Start it, again or for the first time, and wait until it serves."""
        self.state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "holdfast.cli", "master", "--job", "test"]
        command += ["--listen", f"127.0.0.1:{self.port}", "--state", str(self.state)]
        # Its note for `holdfast status` stays in its own folder.
        environ = os.environ | {
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_RUNTIME_DIR": str(self.state),
        }
        with open(self.state / "stderr", "ab") as log:
            self._process = subprocess.Popen(
                [*command, "--http", "off"],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environ,
            )
        self.port = int(self._announced().rpartition(":")[2])
        return self

    def kill(self) -> None:
        """SIGKILL: it has no chance to say or save anything. Also the way to end it for good."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process = None

    def client(self, scope: int) -> AgentClient:
        return AgentClient(self.address, read_token(self.token_file), scope=scope)

    def worker_environment(self, scope: int) -> dict[str, str]:
        """What an agent would tell a worker of round `scope`, with this master in its place."""
        return {
            "HOLDFAST_SOCKET": self.address,
            "HOLDFAST_TOKEN_FILE": str(self.token_file),
            "HOLDFAST_ROUND": str(scope),
        }

    def _announced(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], START_S)
        line = self._process.stdout.readline() if readable else ""
        if not line.startswith(ANNOUNCEMENT):
            self.kill()
            said = (self.state / "stderr").read_text(encoding="utf-8", errors="replace")
            raise AssertionError(f"the master did not start: {line!r}\n{said}")
        return line.strip()
