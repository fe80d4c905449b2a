# SPDX-License-Identifier: Apache-2.0
"""The agent's socket for its workers: what goes through it, what does not, and who may use it."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.client import AgentClient
from holdfast.model.errors import AuthError, RejectedError
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from tests.integration.control import wait_held
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs, MasterCommand

SCOPE = 1
NOBODY = 65534

RULES = m.JobRules(
    min_nodes=1, max_nodes=1, node_unit=1, last_call_s=1.0, join_timeout_s=60.0, max_restarts=3
)
FAILURE = m.FailureInfo(0, 0, 1, 1, None, "error", "a worker's invention")
NOT_FOR_WORKERS: tuple[m.Call, ...] = (
    m.Attach(agent_key="k", rules=RULES, nproc=1, host="h", store_port=1),
    m.WorkersStarted(1, 1, "cold", 0.1),
    m.StoreOffered(1),
    m.WorkersFailed(1, (FAILURE,)),
    m.WorkersDone(1),
    m.Leave("a worker's invention"),
    m.Beat(1, 1, 1, 0.0, 0.0, 0.0, 0),
    m.Observe(follow=True),
    m.StopJob("a worker's invention"),
)


class Node:
    """One master and one node whose worker idles, with the address of the agent's socket."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.master: MasterCommand = jobs.master("--http", "off")
        self.agent: Command = jobs.node(self.master, "--no-spares", str(SCRIPTS / "idles.py"))
        jobs.wait_for("main")
        self.address = (jobs.folder / "socket-0").read_text()
        self.socket = Path(self.address.removeprefix("unix:"))

    def client(self) -> AgentClient:
        return AgentClient(self.address, read_token(self.master.token_file), scope=SCOPE)

    def restart_master(self) -> None:
        self.master.kill()
        self.master = self.jobs.master("--http", "off", listen=self.master.address)

    def finish(self) -> None:
        """The job is whole: its worker ran once and ends well."""
        self.jobs.finish()
        self.agent.succeeds()
        self.master.succeeds()
        assert len(self.jobs.events("main")) == 1


@pytest.fixture
def node(jobs: Jobs) -> Node:
    return Node(jobs)


def test_requests_outlive_the_master(node: Node) -> None:
    """A held get, and adds that never stop: each is answered once, in spite of two kills."""
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(
            lambda: node.client().ask(m.KvGet(SCOPE, ("late",), LIMIT_S), m.Values, LIMIT_S)
        )
        wait_held(node.master)
        enough = threading.Event()

        def add_until_enough() -> list[int]:
            client, sums = node.client(), []
            while not enough.is_set():
                sums.append(client.ask(m.KvAdd(SCOPE, "sum", 1), m.Number, LIMIT_S).number)
            return sums

        adding = threads.submit(add_until_enough)
        try:
            for _ in range(2):
                node.restart_master()
                wait_held(node.master)
        finally:
            enough.set()
        sums = adding.result(LIMIT_S)
        assert sums == list(range(1, len(sums) + 1))
        assert sums
        node.client().ask(m.KvSet(SCOPE, "late", b"at last"), m.Done, LIMIT_S)
        assert waiting.result(LIMIT_S).values == (b"at last",)
    node.finish()


def test_a_worker_may_not_speak_for_its_agent(node: Node) -> None:
    client = node.client()
    for body in NOT_FOR_WORKERS:
        with pytest.raises(RejectedError, match=f"a worker may not send {type(body).__name__}"):
            client.call(body, LIMIT_S)
    # The connection is still good for what is allowed.
    assert client.ask(m.KvAdd(SCOPE, "n", 1), m.Number, LIMIT_S).number == 1
    client.close()
    node.finish()


def test_only_who_has_the_token_is_heard(node: Node) -> None:
    stranger = AgentClient(node.address, b"not the token of this job", scope=SCOPE)
    with pytest.raises(AuthError, match="wrong token"):
        stranger.call(m.KvAdd(SCOPE, "n", 1), LIMIT_S)
    assert node.socket.parent.stat().st_mode & 0o077 == 0
    assert node.socket.stat().st_mode & 0o177 == 0
    node.finish()


# Prints what the server says to another user before anything else, in hexadecimal.
STRANGER = f"""
import os, socket
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
peer = socket.socket(socket.AF_UNIX)
peer.settimeout({LIMIT_S})
peer.connect("agent.sock")
said = b""
while data := peer.recv(4096):
    said += data
print(said.hex())
"""


def test_another_user_is_refused_even_if_the_folder_is_open(node: Node) -> None:
    if os.getuid() != 0:
        pytest.skip("becomes another user: run the tests as root")
    node.socket.parent.chmod(0o711)
    node.socket.chmod(0o666)
    # Its working directory, so that the folders above need not be open, too.
    stranger = subprocess.run(
        [sys.executable, "-c", STRANGER],
        cwd=node.socket.parent,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    (frame,) = codec.FrameReader().feed(bytes.fromhex(stranger.stdout))
    assert frame.body == m.Refused("auth", "this socket belongs to another user")
    node.finish()
