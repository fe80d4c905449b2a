# SPDX-License-Identifier: Apache-2.0
"""The worker's client against a real master that is killed, and against peers that misbehave."""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from holdfast import client as holdfast_client
from holdfast.client import AgentClient
from holdfast.client.progress import saving_step
from holdfast.model.errors import (
    AuthError,
    ProtocolError,
    TimedOutError,
    UsageError,
)
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, listen
from holdfast.worker.progress import ProgressCell
from tests.integration.control import shut
from tests.masters import ROOT, Master
from tests.waiting import until
from tests.wire.samples import MESSAGES

LIMIT_S = 120.0
SCOPES = itertools.count(1)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """Shared by the tests that leave it alone."""
    server = Master(tmp_path_factory.mktemp("master"))
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Master]:
    """For the tests that kill it."""
    server = Master(tmp_path / "master")
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def client(master: Master) -> Iterator[AgentClient]:
    connected = master.client(next(SCOPES))
    yield connected
    connected.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def add(client: AgentClient, key: str = "count") -> int:
    return client.ask(m.KvAdd(client.scope, key, 1), m.Number, LIMIT_S).number


def put(client: AgentClient, key: str, value: bytes) -> None:
    client.ask(m.KvSet(client.scope, key, value), m.Done, LIMIT_S)


def get(client: AgentClient, key: str, timeout_s: float = LIMIT_S) -> bytes:
    request = m.KvGet(client.scope, (key,), timeout_s)
    return client.ask(request, m.Values, timeout_s).values[0]


def waiting_requests(client: AgentClient) -> int:
    """How many requests the master holds."""
    state = json.loads(client.ask(m.Observe(follow=False), m.Observed, LIMIT_S).state)
    number: int = state["store"]["waiting"]
    return number


# ---- the master is killed -----------------------------------------------------------------------


def test_a_wait_goes_on_over_the_death_of_the_master(
    mortal: Master, threads: ThreadPoolExecutor
) -> None:
    client = mortal.client(1)
    put(client, "before", b"kept")
    waiting = threads.submit(get, client, "later")
    until(lambda: waiting_requests(client) == 1, LIMIT_S)
    mortal.kill()
    assert not waiting.done()
    mortal.start()
    put(client, "later", b"value")
    assert waiting.result(LIMIT_S) == b"value"
    assert get(client, "before") == b"kept"


def test_a_barrier_is_passed_over_the_death_of_the_master(
    mortal: Master, threads: ThreadPoolExecutor
) -> None:
    client = mortal.client(1)
    arrive = m.Barrier(1, "barrier", "first", 2, LIMIT_S)
    waiting = threads.submit(client.ask, arrive, m.Number, LIMIT_S)
    until(lambda: waiting_requests(client) == 1, LIMIT_S)
    mortal.kill()
    mortal.start()
    second = m.Barrier(1, "barrier", "second", 2, LIMIT_S)
    assert client.ask(second, m.Number, LIMIT_S) == m.Number(1)
    assert waiting.result(LIMIT_S) == m.Number(1)


def test_every_addition_counts_once_while_the_master_is_killed(
    mortal: Master, threads: ThreadPoolExecutor
) -> None:
    client = mortal.client(1)
    reached = {number: threading.Event() for number in (20, 60, 100)}

    def add_many() -> list[int]:
        sums = []
        for number in range(1, 141):
            sums.append(add(client))
            if number in reached:
                reached[number].set()
        return sums

    adding = threads.submit(add_many)
    for event in reached.values():
        assert event.wait(LIMIT_S)
        mortal.kill()
        mortal.start()
    assert adding.result(LIMIT_S) == list(range(1, 141))


# ---- connections that break ---------------------------------------------------------------------


class CuttingProxy:
    """Stands between client and server and cuts the first connections before their first answer.

    The request has reached the server by then: what is lost is the news of it.
    """

    def __init__(self, port: int, cuts: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts_left = cuts
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        # A shutdown wakes the thread that accepts; closing alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._ends:
            shut(end)
        for thread in self._threads:
            thread.join(LIMIT_S)
        for end in self._ends:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target, LIMIT_S)
            self._ends += (near, far)
            is_cut = self.cuts_left > 0
            self.cuts_left -= is_cut
            # Challenge and Welcome pass, then comes the answer.
            frames = 2 if is_cut else sys.maxsize
            for pump in ((near, far, sys.maxsize), (far, near, frames)):
                thread = threading.Thread(target=self._pump, args=pump)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, frames_max: int) -> None:
        reader, frames = codec.FrameReader(), 0
        try:
            while data := source.recv(1 << 16):
                frames += len(list(reader.feed(data)))
                if frames > frames_max:
                    return
                sink.sendall(data)
        except OSError:
            return
        finally:
            shut(source)
            shut(sink)


@pytest.fixture
def cutting(master: Master) -> Iterator[Callable[[int], tuple[CuttingProxy, AgentClient]]]:
    with contextlib.ExitStack() as stack:

        def make(cuts: int) -> tuple[CuttingProxy, AgentClient]:
            proxy = CuttingProxy(master.port, cuts)
            stack.callback(proxy.close)
            token = read_token(master.token_file)
            client = AgentClient(proxy.address, token, scope=next(SCOPES))
            stack.callback(client.close)
            return proxy, client

        yield make


Cutting = Callable[[int], tuple[CuttingProxy, AgentClient]]


def test_a_repeated_addition_counts_once(cutting: Cutting) -> None:
    proxy, client = cutting(4)
    assert add(client) == 1
    assert proxy.cuts_left == 0, "every cut was met by a new connection"
    assert add(client) == 2


def test_a_repeated_pop_takes_one_element(cutting: Cutting, master: Master) -> None:
    proxy, client = cutting(2)
    direct = master.client(client.scope)
    for value in (b"first", b"second"):
        direct.ask(m.QueuePush(direct.scope, "queue", value), m.Number, LIMIT_S)
    pop = m.QueuePop(client.scope, "queue", LIMIT_S)
    assert client.ask(pop, m.Value, LIMIT_S).value == b"first"
    assert proxy.cuts_left == 0
    assert direct.ask(m.QueueLength(direct.scope, "queue"), m.Number, LIMIT_S).number == 1


def test_a_wait_that_is_asked_again_keeps_its_limit(cutting: Cutting) -> None:
    _, client = cutting(1)
    begun = time.monotonic()
    # The cut comes with the answer, so when the time is over: nothing of it is left then.
    with pytest.raises(TimedOutError):
        get(client, "missing", timeout_s=5.0)
    # Less than twice the limit, with all the rest of it for a busy machine.
    assert 5.0 <= time.monotonic() - begun < 9.9


@dataclass
class Forgetful:
    """A server that hangs up at the first request, and answers the second."""

    asked: list[m.AnyMessage] = field(default_factory=list)

    def opened(self, link: Link) -> None: ...

    def received(self, link: Link, frame: m.Frame) -> None:
        self.asked.append(frame.body)
        if len(self.asked) == 1:
            link.abort()
        else:
            link.answer(m.Done(), frame.call)

    def closed(self, link: Link) -> None: ...


WAITING = [
    msgspec.structs.replace(body, timeout_s=10 * LIMIT_S)
    for body in MESSAGES
    if hasattr(body, "timeout_s")
]


@pytest.mark.parametrize("body", WAITING, ids=lambda body: type(body).__name__)
def test_every_request_that_waits_waits_for_the_rest_of_its_time(
    body: m.Call, tmp_path: Path
) -> None:
    async def ask() -> list[m.AnyMessage]:
        server, address = Forgetful(), f"unix:{tmp_path}/sock"
        listening = await listen(address, server, b"token")
        client = AgentClient(address, b"token", scope=1)
        assert await asyncio.to_thread(client.call, body, LIMIT_S) == m.Done()
        client.close()
        await listening.close()
        return server.asked

    first, again = asyncio.run(ask())
    assert first == body
    assert isinstance(again, type(body))
    assert 0.0 <= getattr(again, "timeout_s", -1.0) <= LIMIT_S


# ---- threads and forks --------------------------------------------------------------------------


def test_threads_share_a_client(client: AgentClient, threads: ThreadPoolExecutor) -> None:
    waiting = [threads.submit(get, client, "later") for _ in range(4)]

    def add_many(_: int) -> list[int]:
        return [add(client) for _ in range(50)]

    sums = sorted(itertools.chain.from_iterable(threads.map(add_many, range(4), timeout=LIMIT_S)))
    assert sums == list(range(1, 201))
    put(client, "later", b"value")
    assert [wait.result(LIMIT_S) for wait in waiting] == [b"value"] * 4


def test_a_forked_child_shares_a_client(client: AgentClient) -> None:
    """Both go on with the same object, and no answer reaches the wrong one."""
    assert add(client) == 1
    children = [
        multiprocessing.get_context("fork").Process(target=_add_in_child, args=(client, key))
        for key in ("left", "right")
    ]
    try:
        for child in children:
            child.start()
        assert [add(client) for _ in range(50)] == list(range(2, 52))
        for child in children:
            child.join(LIMIT_S)
        assert [child.exitcode for child in children] == [0, 0]
    finally:
        for child in children:
            child.kill()
            child.join()
            child.close()
    assert add(client, "left") == 51


def _add_in_child(client: AgentClient, key: str) -> None:
    assert [add(client, key) for _ in range(50)] == list(range(1, 51))


# ---- requests that the client or the master refuses ----------------------------------------------


def test_a_client_without_the_token_is_refused_at_once(master: Master) -> None:
    with pytest.raises(AuthError):
        add(AgentClient(master.address, b"not the token of the job", scope=1))


def test_a_value_over_the_frame_limit_is_refused_here(client: AgentClient) -> None:
    with pytest.raises(ProtocolError, match="frame limit"):
        put(client, "key", bytes(codec.FRAME_BYTES_MAX))
    assert add(client) == 1


# ---- what scripts call --------------------------------------------------------------------------


@pytest.fixture
def as_worker(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in master.worker_environment(next(SCOPES)).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("as_worker")
def test_keys_and_barriers_of_a_worker(threads: ThreadPoolExecutor) -> None:
    holdfast_client.kv_set("key", b"value")
    assert holdfast_client.kv_get("key") == b"value"
    assert holdfast_client.kv_add("count", 2) == 2
    with pytest.raises(TimedOutError):
        holdfast_client.kv_get("missing", timeout_s=0.1)
    for generation in (1, 2):
        arrivals = [threads.submit(holdfast_client.barrier, "step", 3) for _ in range(3)]
        assert [arrival.result(LIMIT_S) for arrival in arrivals] == [generation] * 3


@pytest.mark.usefixtures("as_worker")
def test_the_client_of_a_worker_is_one_and_has_its_round() -> None:
    client = holdfast_client.current()
    assert client is not None
    assert client is holdfast_client.current()
    assert client.scope == int(os.environ["HOLDFAST_ROUND"])


@pytest.mark.usefixtures("as_worker")
def test_a_step_is_written_into_the_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "cell")
    cell = ProgressCell.create(path)
    monkeypatch.setenv("HOLDFAST_PROGRESS", path)
    holdfast_client.report_step(41)
    holdfast_client.report_step(42)
    holdfast_client.report_step(42)
    assert (cell.read().reported_step, cell.read().reports) == (42, 2)
    assert cell.read().total_steps == 0
    holdfast_client.report_step(43, total=100)
    holdfast_client.report_step(44)
    assert (cell.read().reported_step, cell.read().total_steps) == (44, 100)
    cell.close()


@pytest.mark.usefixtures("as_worker")
def test_saves_that_follow_each_other_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is saved twice, in memory and on storage, is one step, and alone it is none."""
    path = str(tmp_path / "cell")
    cell = ProgressCell.create(path)
    assert cell.read().saved_step == -1
    monkeypatch.setenv("HOLDFAST_PROGRESS", path)
    saving_step(1000)
    saving_step(1000)
    first = cell.read()
    assert (first.saved_step, first.saves, first.first_step_at) == (1000, 0, 0.0)
    saving_step(1001)
    saving_step(1002)
    then = cell.read()
    assert (then.saved_step, then.saves) == (1002, 3)
    assert 0 < then.first_step_at < then.last_step_at
    cell.close()


def test_saves_that_are_far_apart_are_no_steps(tmp_path: Path) -> None:
    """Between them nothing is known of the program: to call it hung would be a guess."""
    cell = ProgressCell.create(str(tmp_path / "cell"))
    cell.saved(1, 10.0, None)
    cell.saved(2, 3610.0, None)
    assert (cell.read().saved_step, cell.read().saves, cell.read().last_step_at) == (2, 0, 0.0)
    cell.close()


def test_outside_of_holdfast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOLDFAST_SOCKET", raising=False)
    assert holdfast_client.current() is None
    holdfast_client.report_step(1)
    with pytest.raises(UsageError, match="holdfast run"):
        holdfast_client.kv_get("key")


def run_python(program: str, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")} | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_client_is_light() -> None:
    program = (
        "import sys, threading, holdfast.client\n"
        "print({'asyncio', 'torch', 'uvloop'} & set(sys.modules), threading.active_count())"
    )
    with run_python(program) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert output.strip() == "set() 1"


GLOO_WORKER = """
import gc, torch, torch.distributed as dist, holdfast.torch
dist.init_process_group("gloo", init_method="holdfast://")
gc.collect()
total = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(total)
dist.barrier()
pair = dist.new_group([0, 1])
gathered = [None, None]
dist.all_gather_object(gathered, dist.get_rank(), group=pair)
print(total.tolist(), gathered, dist.get_world_size())
dist.destroy_process_group()
"""


def test_two_processes_form_a_gloo_group(master: Master) -> None:
    environ = master.worker_environment(next(SCOPES))
    environ |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    workers = [run_python(GLOO_WORKER, environ | {"RANK": str(rank)}) for rank in range(2)]
    try:
        outputs = [worker.communicate(timeout=LIMIT_S)[0].strip() for worker in workers]
        assert outputs == ["[3.0, 3.0] [0, 1] 2"] * 2
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
