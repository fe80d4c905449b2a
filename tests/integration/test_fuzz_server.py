# SPDX-License-Identifier: Apache-2.0
"""Hostile peers at the doors of a live master and a live agent, while honest ones are served."""

import asyncio
import contextlib
import math
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import UnionType
from typing import Any, Self, get_args

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from holdfast.client import AgentClient
from holdfast.model.errors import RejectedError
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, listen
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs, MasterCommand
from tests.waiting import until

SCOPE = 1
SEED = 20
SILENT_PEERS = 200
MEGABYTE = 1024 * 1024
LATENCY_S = 5.0
BURST = 16


class Peer:
    """A connection on which anything can be said."""

    def __init__(self, address: str) -> None:
        if address.startswith("unix:"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def shake_hands(self, token: bytes) -> None:
        """Become an honest peer, so far."""
        challenge = self.receive()
        assert isinstance(challenge, m.Challenge)
        nonce = bytes(codec.NONCE_BYTES)
        proof = m.Proof(m.VERSION, nonce, codec.client_mac(token, challenge.nonce, nonce))
        self.say(codec.encode(proof))
        assert isinstance(self.receive(), m.Welcome)

    def receive(self) -> m.AnyMessage:
        (length,) = struct.unpack("<I", self._exactly(4))
        return codec.decode(self._exactly(length)).body

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            assert more, "the server hung up"
            data += more
        return data

    def say(self, data: bytes) -> None:
        """Send as much as the server takes; it may hang up at any byte."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def is_hung_up_on(self) -> None:
        """Wait until the server has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(65536):
                pass

    def is_reset(self) -> None:
        """Ask on, without reading a byte, until the server has cut the connection."""

        def cannot_ask() -> bool:
            try:
                self.socket.sendall(codec.encode(m.KvCount(SCOPE), 1))
            except ConnectionError:
                return True
            return False

        until(cannot_ask, LIMIT_S, "the end of the connection")


class Honest:
    """Somebody who counts, through agent and master, all the time; and how long each count took."""

    def __init__(self, address: str, token: bytes) -> None:
        self._client = AgentClient(address, token, scope=SCOPE)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self.took_s: list[float] = []
        self.sums: list[int] = []

    def _count(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            request = m.KvAdd(SCOPE, "honest", 1)
            self.sums.append(self._client.ask(request, m.Number, LIMIT_S).number)
            self.took_s.append(time.monotonic() - began)
            self._stop.wait(0.005)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        self._client.close()

    def was_served(self) -> None:
        """Every request once, and (but for the few that the busy machine delayed) soon."""
        assert self.sums
        assert self.sums == list(range(1, len(self.sums) + 1))
        late = sum(took_s > LATENCY_S for took_s in self.took_s)
        assert late <= len(self.took_s) // 20, sorted(self.took_s)[-5:]


class Target:
    """A job of one idle worker: its master and its agent are shot at."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.master: MasterCommand = jobs.master("--http", "off")
        self.agent: Command = jobs.node(self.master, "--no-spares", str(SCRIPTS / "idles.py"))
        jobs.wait_for("main")
        self.token = read_token(self.master.token_file)
        socket_file = jobs.folder / "socket-0"
        self.addresses = {"master": self.master.address, "agent": socket_file.read_text()}
        self._before = self._memory()

    def honest(self) -> Honest:
        return Honest(self.addresses["agent"], self.token)

    def peer(self, door: str) -> Peer:
        return Peer(self.addresses[door])

    def friend(self, door: str) -> Peer:
        peer = self.peer(door)
        peer.shake_hands(self.token)
        return peer

    def _memory(self) -> list[int]:
        pids = (self.master.pid, self.agent.pid)
        return [psutil.Process(pid).memory_info().rss for pid in pids]

    def is_unharmed(self, *, growth_bytes_max: int = 64 * MEGABYTE) -> None:
        """Both serve on, neither grew nor complained, and the worker never noticed."""
        for before, after in zip(self._before, self._memory(), strict=True):
            assert after - before < growth_bytes_max
        self.jobs.finish()
        self.agent.succeeds()
        self.master.succeeds()
        assert len(self.jobs.events("main")) == 1
        for command in (self.master, self.agent):
            assert "Traceback" not in command.text, command.text
            assert "exception" not in command.text.lower(), command.text


@pytest.fixture
def target(jobs: Jobs) -> Target:
    return Target(jobs)


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def noise(chance: random.Random) -> Iterator[bytes]:
    """Things to say that mean nothing, and that a server must hang up on."""
    for size in (4, 64, 5000):
        yield b"\xff" * 4 + chance.randbytes(size)
    yield struct.pack("<I", 2**31) + b"x" * 100
    yield struct.pack("<I", codec.FRAME_BYTES_MAX + 1)
    yield frame(b"")
    yield frame(b"\xc1")
    yield frame(b"\x91" * 900)
    for _ in range(5):
        yield frame(chance.randbytes(chance.randrange(1, 200)))
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200)


@pytest.mark.parametrize("door", ["master", "agent"])
def test_noise_before_and_after_the_handshake(target: Target, door: str) -> None:
    chance = random.Random(SEED)
    with target.honest() as honest:
        for data in noise(chance):
            with target.peer(door) as peer:
                peer.say(data)
                peer.is_hung_up_on()
            with target.friend(door) as friend:
                friend.say(data)
                friend.is_hung_up_on()
        early: list[m.AnyMessage] = [m.Welcome(b"x" * 32), m.KvAdd(SCOPE, "honest", 1), m.Done()]
        early += [m.Proof(m.VERSION, b"", b""), m.Proof(99, b"n" * 32, b"m" * 32)]
        for body in early:
            with target.peer(door) as peer:
                peer.say(codec.encode(body, 1))
                peer.is_hung_up_on()
    honest.was_served()
    target.is_unharmed()


def test_peers_that_say_nothing_or_half_a_word(target: Target) -> None:
    """They hold a place, and lose it when their time is up; friends may be slow."""
    with contextlib.ExitStack() as crowd, target.honest() as honest:
        peers = [
            crowd.enter_context(target.peer(door))
            for _ in range(SILENT_PEERS // 2)
            for door in ("master", "agent")
        ]
        for number, peer in enumerate(peers):
            peer.say(codec.encode(m.Proof(m.VERSION, b"n" * 32, b"m" * 32))[: number % 40])
        slow = [crowd.enter_context(target.friend(door)) for door in ("master", "agent")]
        half = codec.encode(m.KvAdd(SCOPE, "slow", 1), 7, "s", 1)
        for friend in slow:
            friend.say(half[:10])
        for peer in peers:
            peer.is_hung_up_on()
        for friend in slow:
            friend.say(half[10:])
            # One session: what the second asks is a repetition of what the first did.
            assert friend.receive() == m.Number(1)
    honest.was_served()
    target.is_unharmed()


# ---- messages that are well formed and absurd ---------------------------------------------------

INTS = (-(2**63), -1, 0, 1, 2, 2**31, 2**63 - 1, 2**64 - 1)
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 0.01, 1e300)
TEXTS = ("", "honest", "\0", "key", "ü" * 500, "-1", "error", "killed")
BYTES = (b"", b"1", b"not a number", b"\xff" * 100, b"9" * 30)


def absurd(kind: Any, chance: random.Random) -> Any:
    """A value of this type that only an enemy would send."""
    choices: dict[Any, tuple[object, ...]] = {
        int: INTS, float: FLOATS, str: TEXTS, bytes: BYTES, bool: (False, True), type(None): (None,)
    }  # fmt: skip
    if hasattr(kind, "__metadata__"):
        kind = get_args(kind)[0]  # Outside of its limits, too.
    if kind in choices:
        return chance.choice(choices[kind])
    if isinstance(kind, UnionType):
        return absurd(chance.choice(get_args(kind)), chance)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return kind(*(absurd(field.type, chance) for field in fields))
    inner = get_args(kind)
    if inner[1:] == (...,):
        return tuple(absurd(inner[0], chance) for _ in range(chance.randrange(4)))
    return {absurd(inner[0], chance): absurd(inner[1], chance) for _ in range(2)}


def test_absurd_agents(jobs: Jobs) -> None:
    """Agents with the token, and with nothing sensible to say. The job may end, but in order."""
    chance = random.Random(SEED)
    master = jobs.master("--http", "off")
    token = read_token(master.token_file)
    rules = m.JobRules(1, 2, 1, 0.0, LIMIT_S, 2**31)
    kinds = [*get_args(m.AgentCall), m.Beat, m.Beat, m.KvAdd, m.QueuePush, m.Barrier]
    for number in range(40):
        # When the job has ended by what they said, so has the master.
        with contextlib.suppress(ConnectionError, AssertionError), Peer(master.address) as peer:
            peer.shake_hands(token)
            attach = absurd(m.Attach, chance)
            key = f"enemy{number}"
            peer.say(codec.encode(replace(attach, agent_key=key, rules=rules, incarnation=0), 1))
            for _ in range(30):
                body = absurd(chance.choice(kinds), chance)
                if isinstance(body, m.WorkersStarted | m.WorkersFailed | m.WorkersDone | m.Beat):
                    body = replace(body, round=chance.randrange(1, 5))
                peer.say(sayable(body))
    assert "Traceback" not in master.text, master.text
    master.kill()
    # What they left in the journal is understood.
    again = jobs.master("--http", "off", listen=master.address)
    again.kill()
    assert "Traceback" not in again.text, again.text


def sayable(body: m.AnyMessage) -> bytes:
    """As bytes, with an absurd idempotency key."""
    return codec.encode(body, 5, "enemy", 1)


@pytest.mark.parametrize("door", ["master", "agent"])
def test_absurd_messages(target: Target, door: str) -> None:
    """Any answer is fine, also none; the server lives, and nobody else waits for it."""
    chance = random.Random(SEED)
    kinds = [kind for kind in get_args(m.AnyMessage) if kind is not m.StopJob]
    with target.honest() as honest:
        for _ in range(25):
            with target.friend(door) as friend:
                for kind in chance.sample(kinds, len(kinds)):
                    body = absurd(kind, chance)
                    if not _touches_honest(body):
                        friend.say(sayable(body))
        with target.friend(door) as friend:
            friend.say(codec.encode(m.KvAdd(SCOPE, "n", 1), 9, "s", 1))
            assert friend.receive() == m.Number(1)
    honest.was_served()
    target.is_unharmed()


def _touches_honest(body: m.AnyMessage) -> bool:
    """Whether it would change, rightfully, what the honest one counts in."""
    key = getattr(body, "key", None)
    keys = getattr(body, "keys", ())
    return "honest" in (key, *keys) and getattr(body, "scope", None) == SCOPE


# ---- answers that are too large or not read -----------------------------------------------------


def test_an_answer_over_the_frame_limit(target: Target) -> None:
    """Asked for more than a frame can hold: that one request fails, and nothing else."""
    large = b"x" * (codec.FRAME_BYTES_MAX // 2)
    keys = tuple(f"large{number}" for number in range(3))
    client = AgentClient(f"tcp:{target.master.address}", target.token, scope=SCOPE)
    with target.honest() as honest:
        for key in keys:
            client.ask(m.KvSet(SCOPE, key, large), m.Done, LIMIT_S)
        with pytest.raises(RejectedError, match=r"Values of .* is over the frame limit"):
            client.call(m.KvGet(SCOPE, keys, LIMIT_S), LIMIT_S)
        client.close()
        # An answer that leaves only when a commit is done, together with those of others.
        with target.friend("master") as friend:
            add = codec.encode(m.KvAdd(SCOPE, "n", 1), 1, "s", 1)
            friend.say(add + codec.encode(m.KvGet(SCOPE, keys, LIMIT_S), 2))
            assert friend.receive() == m.Number(1)
            assert isinstance(friend.receive(), m.Refused)
    honest.was_served()
    target.is_unharmed(growth_bytes_max=256 * MEGABYTE)


def test_a_burst_of_large_values_is_no_crime(target: Target) -> None:
    """All workers of a node set and get large values at once: more than any buffer should hold."""

    def set_and_get(number: int) -> bool:
        client = AgentClient(target.addresses["agent"], target.token, scope=SCOPE)
        value = bytes([number]) * (8 * MEGABYTE)
        client.ask(m.KvSet(SCOPE, str(number), value), m.Done, LIMIT_S)
        (found,) = client.ask(m.KvGet(SCOPE, (str(number),), LIMIT_S), m.Values, LIMIT_S).values
        client.close()
        return found == value

    with target.honest() as honest, ThreadPoolExecutor(BURST) as threads:
        assert all(threads.map(set_and_get, range(BURST)))
    assert honest.sums
    assert "broke" not in target.agent.text
    target.is_unharmed(growth_bytes_max=1024 * MEGABYTE)


def test_peers_that_never_read_are_cut_off(target: Target) -> None:
    """What waits for them is limited, in size and in time, and the others are served meanwhile."""
    client = AgentClient(f"tcp:{target.master.address}", target.token, scope=SCOPE)
    client.ask(m.KvSet(SCOPE, "large", b"x" * (8 * MEGABYTE)), m.Done, LIMIT_S)
    client.close()
    with contextlib.ExitStack() as crowd, target.honest() as honest:
        peers = [crowd.enter_context(target.friend(door)) for door in ("master", "agent")]
        for peer in peers:
            for number in range(12):
                peer.say(codec.encode(m.KvGet(SCOPE, ("large",), LIMIT_S), number))
        for peer in peers:
            peer.is_reset()
        greedy = crowd.enter_context(target.friend("master"))
        greedy.say(codec.encode(m.KvGet(SCOPE, ("large",), LIMIT_S), 1) * 1000)
        greedy.is_reset()
    honest.was_served()
    target.is_unharmed(growth_bytes_max=1024 * MEGABYTE)


class Generous:
    """Answers every request with much."""

    def __init__(self) -> None:
        self.heard = 0

    def opened(self, link: Link) -> None:
        """Everybody may ask."""

    def received(self, link: Link, frame: m.Frame) -> None:
        self.heard += 1
        link.answer(m.Values((bytes(8 * MEGABYTE),)), frame.call)

    def closed(self, link: Link) -> None:
        """Nobody is missed."""


def test_who_is_cut_off_for_asking_too_much_is_not_heard_to_the_end() -> None:
    """Answers that nobody will get would keep the server from everybody else for seconds."""
    token, requests = bytes(32), 1000
    handler = Generous()

    def ask(address: str) -> None:
        with Peer(address) as greedy:
            greedy.shake_hands(token)
            greedy.say(codec.encode(m.KvGet(SCOPE, ("large",), LIMIT_S), 1) * requests)
            greedy.is_hung_up_on()

    async def serve() -> None:
        server = await listen("127.0.0.1:0", handler, token)
        await asyncio.to_thread(ask, server.address)
        await server.close()

    asyncio.run(serve())
    assert 0 < handler.heard < requests // 4
