# SPDX-License-Identifier: Apache-2.0
"""Agents that fetch parts from each other and leave copies, over real sockets that fail.

The prior art's replicas restore zeros under a valid step, its reader spins for ever when the peer
dies in the middle of a message, and nothing checks the bytes.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.parity import rebuild
from holdfast.checkpoint.peer_server import ANSWERS_MAX
from holdfast.checkpoint.peers import PeerClient
from holdfast.checkpoint.slots import HEADER, META_MAX, Slot, SlotMeta, lay_out
from holdfast.checkpoint.wire import Wire
from holdfast.model.checkpoint import Version, rank_part
from holdfast.model.errors import AuthError, RejectedError, RetryableError, StateError
from holdfast.model.parity import Block, blocks_of, rebuildable
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import PartBytes, PartGet, PartPut, PartWanted
from tests.integration.peer_nodes import (
    DIRECTORY,
    GET,
    LIMIT_S,
    MB,
    PART,
    SHAPE,
    TOKEN,
    VERSION,
    Fault,
    Node,
    Proxy,
    contents,
    fetch,
    image,
    play,
    started_in,
    targets_in,
)
from tests.waiting import until

IMPATIENT_S = 1.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with started_in(tmp_path) as start:
        yield start


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Callable[[int], Slot]]:
    with targets_in(tmp_path) as target:
        yield target


@pytest.fixture
def node(start: Callable[..., Node]) -> Node:
    return start()


# ---- fetching --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * MB, 70 * MB + 5])
def test_what_is_fetched_is_the_same_slot(
    node: Node, target: Callable[[int], Slot], size: int
) -> None:
    """Prior art: the gathered bytes are never copied, so zeros are restored under a valid step."""
    saved = node.shelf.save(contents(size))
    slot = fetch(node.client(), target)
    assert slot.read() == saved.slot.read()
    assert bytes(slot.data[: saved.offer.total]) == image(saved)


def test_zeros_are_never_taken_for_a_part(node: Node, target: Callable[[int], Slot]) -> None:
    saved = node.shelf.save({"weights": b"\x01" * MB})
    saved.slot.data[:MB] = bytes(MB)
    offer = node.client().look(GET, LIMIT_S)
    slot = target(MB)
    with pytest.raises(StateError, match="rank-00003 of step 16777217 came damaged"):
        node.client().fetch(GET, offer, slot, LIMIT_S)
    assert slot.read() is None


def test_a_part_without_a_digest_is_not_given(node: Node) -> None:
    saved = node.shelf.save(contents(10))
    node.shelf.keep(saved.slot, digest=-1)
    with pytest.raises(RejectedError, match="no digest yet"):
        node.client().look(GET, LIMIT_S)


@pytest.mark.parametrize(
    "get",
    [
        PartGet(DIRECTORY, VERSION, rank_part(4)),
        PartGet(DIRECTORY, Version(VERSION.lineage, VERSION.step - 1), PART),
    ],
)
def test_a_part_or_a_version_that_is_not_there(node: Node, get: PartGet) -> None:
    node.shelf.save(contents(10))
    with pytest.raises(RejectedError, match="is not here"):
        node.client().look(get, LIMIT_S)


@pytest.mark.parametrize("after", [200, 100_000, 2 * MB])
def test_a_fetch_goes_on_after_a_broken_connection(
    node: Node, target: Callable[[int], Slot], after: int
) -> None:
    saved = node.shelf.save(contents(40 * MB))
    clean = Fault("cut", 10**12)
    with Proxy(node.server.address, clean, Fault("cut", after), Fault("cut", 33 * MB)) as proxy:
        slot = fetch(node.client(proxy.address), target)
        assert proxy.connections == 4
        # A chunk is repeated at most for each break, never the whole.
        assert proxy.carried < (40 + 2 * 16 + 1) * MB
    assert bytes(slot.data[: saved.offer.total]) == image(saved)


def test_a_byte_that_changes_on_the_way_is_found(node: Node, target: Callable[[int], Slot]) -> None:
    saved = node.shelf.save(contents(MB))
    total = saved.offer.total
    for after in (1000, 500_000, total + 100):  # The last one is in the meta.
        slot = target(MB + 8192)
        with Proxy(node.server.address, Fault("flip", after)) as proxy:
            client = node.client(proxy.address)
            with pytest.raises(StateError, match="came damaged"):
                client.fetch(GET, saved.offer, slot, LIMIT_S)
        assert slot.read() is None


def test_a_peer_that_stops_in_the_middle_is_given_up(
    node: Node, target: Callable[[int], Slot]
) -> None:
    node.shelf.save(contents(MB))
    stalls = [Fault("stall", 100_000) for _ in range(8)]
    with Proxy(node.server.address, Fault("cut", 10**12), *stalls) as proxy:
        client = node.client(proxy.address, IMPATIENT_S)
        offer = client.look(GET, LIMIT_S)
        slot = target(offer.holding.length)
        began = time.monotonic()
        with pytest.raises(RetryableError, match="broke off: timed out"):
            client.fetch(GET, offer, slot, LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 2
    assert slot.read() is None


def test_no_fetch_lasts_longer_than_its_limit(node: Node, target: Callable[[int], Slot]) -> None:
    node.shelf.save(contents(MB))
    stalls = [Fault("stall", 100_000) for _ in range(8)]
    with Proxy(node.server.address, *stalls) as proxy:
        offer = node.client().look(GET, LIMIT_S)
        began = time.monotonic()
        with pytest.raises(RetryableError, match="broke off"):
            node.client(proxy.address, LIMIT_S).fetch(GET, offer, target(2 * MB), timeout_s=0.5)
        assert time.monotonic() - began < LIMIT_S / 2


def test_a_peer_that_dies_in_the_middle_of_a_frame() -> None:
    """Prior art: the reader spins for ever on a closed socket in the middle of a message."""

    def half_an_answer(peer: socket.socket) -> None:
        wire = Wire.accept(peer, TOKEN)
        wire.receive()
        peer.sendall(codec.encode(m.Refused("rejected", "x" * 200), 1)[:50])

    address, stop = play(half_an_answer)
    try:
        began = time.process_time()
        with pytest.raises(RetryableError, match="closed the connection in the middle"):
            PeerClient(address, TOKEN, None).look(GET, LIMIT_S)
        assert time.process_time() - began < 1
    finally:
        stop()


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # Nobody else gets this port, and nobody listens on it.
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(RetryableError, match=r"broke off: .*refused"):
            PeerClient(address, TOKEN, None).look(GET, LIMIT_S)


def test_a_part_that_changes_while_it_is_fetched(node: Node, target: Callable[[int], Slot]) -> None:
    node.shelf.save(contents(MB))
    offer = node.client().look(GET, LIMIT_S)
    node.shelf.save(contents(MB))
    slot = target(offer.holding.length)
    with pytest.raises(StateError, match="changed on the peer"):
        node.client().fetch(GET, offer, slot, LIMIT_S)
    assert slot.read() is None


def test_another_part_than_the_one_asked_for(node: Node, target: Callable[[int], Slot]) -> None:
    """A node that mixes its slots up: the prior art keys replicas by position, not by rank."""
    node.shelf.sealed[PART] = node.shelf.save(contents(10), rank_part(5))
    with pytest.raises(StateError, match="rank-00003 was asked for, but rank-00005"):
        node.client().look(GET, LIMIT_S)


def test_offsets_over_4_gib_are_not_cut_short(node: Node) -> None:
    """The slot is a hole: only the pages that are touched take room."""
    length = 5 * 2**30
    path = node.shelf.folder / "large"
    with path.open("wb") as file:
        file.truncate(HEADER + length + META_MAX)
    slot = Slot.open(path, writable=True)
    node.shelf.opened.append(slot)
    files, _ = lay_out([("large", length)])
    slot.begin(VERSION)
    slot.data[length - 5 : length] = b"right"
    slot.data[(length - 5) % 2**32 : (length - 5) % 2**32 + 5] = b"wrong"
    slot.seal(SlotMeta(DIRECTORY, PART, VERSION, SHAPE, files))
    node.shelf.keep(slot, digest=1)
    word = bytearray(5)
    with node.client().reader(GET, LIMIT_S) as reader:
        reader.read_into(length - 5, memoryview(word))
    assert bytes(word) == b"right"
    sent = PartBytes(reader.offer.holding, 2**40 + 1, 2**40 + 2)
    assert codec.decode(codec.encode(sent)[4:]).body == sent


@pytest.mark.parametrize(("offset", "size"), [(-1, 5), (0, 10**9), (10**9, -1)])
def test_ranges_that_are_not_there_are_refused(node: Node, offset: int, size: int) -> None:
    node.shelf.save(contents(10))
    with Wire.connect(node.server.address, TOKEN, None, time.monotonic() + LIMIT_S) as wire:
        answer = wire.ask(PartGet(DIRECTORY, VERSION, PART, offset=offset, size=size))
    assert isinstance(answer, m.Refused)


# ---- leaving copies ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 9 * MB])
def test_what_is_left_there_is_the_same_slot(start: Callable[..., Node], size: int) -> None:
    sender, keeper = start(), start()
    saved = sender.shelf.save(contents(size))
    keeper.client().put(DIRECTORY, 1, saved, LIMIT_S)
    kept = keeper.shelf.sealed[PART]
    assert kept.slot.read() == saved.slot.read()
    assert image(kept) == image(saved)
    assert kept.offer == saved.offer


def test_a_copy_goes_on_where_the_connection_broke(start: Callable[..., Node]) -> None:
    sender, keeper = start(), start()
    saved = sender.shelf.save(contents(20 * MB))
    faults = [Fault("cut", after * MB, upload=True) for after in (9, 5)]
    with Proxy(keeper.server.address, *faults) as proxy:
        keeper.client(proxy.address).put(DIRECTORY, 1, saved, LIMIT_S)
        assert proxy.connections == 3
        assert proxy.carried < 30 * MB
    assert image(keeper.shelf.sealed[PART]) == image(saved)


def test_a_copy_that_is_there_already_is_not_sent_again(start: Callable[..., Node]) -> None:
    sender, keeper = start(), start()
    saved = sender.shelf.save(contents(5 * MB))
    keeper.client().put(DIRECTORY, 1, saved, LIMIT_S)
    with Proxy(keeper.server.address) as proxy:
        keeper.client(proxy.address).put(DIRECTORY, 2, saved, LIMIT_S)
        assert proxy.carried < 10_000


def test_a_byte_that_changes_on_the_way_there_is_refused(start: Callable[..., Node]) -> None:
    sender, keeper = start(), start()
    saved = sender.shelf.save(contents(MB))
    with Proxy(keeper.server.address, Fault("flip", 500_000, upload=True)) as proxy:
        with pytest.raises(RejectedError, match="rank-00003 of step 16777217 came damaged"):
            keeper.client(proxy.address).put(DIRECTORY, 1, saved, LIMIT_S)
        assert PART not in keeper.shelf.sealed
        # It was thrown away as a whole: the next try begins anew.
        keeper.client(proxy.address).put(DIRECTORY, 1, saved, LIMIT_S)
    assert image(keeper.shelf.sealed[PART]) == image(saved)


def test_a_part_under_the_name_of_another_is_refused(start: Callable[..., Node]) -> None:
    sender, keeper = start(), start()
    offer = sender.shelf.save(contents(10)).offer
    claimed = msgspec.structs.replace(offer.holding, part=rank_part(6))
    put = PartPut(DIRECTORY, 1, claimed, offer.total, offer.meta_digest)
    wire = Wire.connect(keeper.server.address, TOKEN, None, time.monotonic() + LIMIT_S)
    with wire, sender.shelf.sealed[PART].slot.data[: offer.total] as whole:
        assert wire.ask(put) == PartWanted(0)
        wire.send_view(whole)
        answer = wire.answer()
    assert isinstance(answer, m.Refused)
    assert answer.message.startswith("rank-00003 of step 16777217 came instead of rank-00006")
    assert not keeper.shelf.sealed


def test_a_peer_without_room_says_so(start: Callable[..., Node]) -> None:
    sender, keeper = start(), start()
    keeper.shelf.quota = MB
    saved = sender.shelf.save(contents(2 * MB))
    with pytest.raises(RejectedError, match="no room for"):
        keeper.client().put(DIRECTORY, 1, saved, LIMIT_S)


def test_a_copy_without_a_digest_is_refused(start: Callable[..., Node]) -> None:
    sender, keeper = start(), start()
    saved = sender.shelf.keep(sender.shelf.save(contents(10)).slot, digest=-1)
    with pytest.raises(RejectedError, match="comes without a digest"):
        keeper.client().put(DIRECTORY, 1, saved, LIMIT_S)


def test_a_forgotten_connection_does_not_block_the_next_one(start: Callable[..., Node]) -> None:
    """The first connection hangs in the middle, as after a cable was pulled: nobody says so."""
    sender, keeper = start(), start(idle_s=LIMIT_S)
    saved = sender.shelf.save(contents(20 * MB))
    put = PartPut(DIRECTORY, 1, saved.offer.holding, saved.offer.total, saved.offer.meta_digest)
    with Wire.connect(keeper.server.address, TOKEN, None, time.monotonic() + LIMIT_S) as hung:
        assert hung.ask(put) == PartWanted(0)
        with saved.slot.data[: 10 * MB] as half:
            hung.send_view(half)
        until(lambda: keeper.shelf.partial[(PART, "")].received == 8 * MB, LIMIT_S)
        keeper.client().put(DIRECTORY, 1, saved, timeout_s=LIMIT_S / 2)
    assert image(keeper.shelf.sealed[PART]) == image(saved)


def test_a_peer_that_stops_reading_is_given_up_long_before_the_deadline(
    start: Callable[..., Node],
) -> None:
    """It accepts, says what it wants and takes nothing: a stopped process, or a pulled cable."""
    saved = start().shelf.save(contents(20 * MB))
    over = threading.Event()
    asked: list[str] = []

    def stop_reading(peer: socket.socket) -> None:
        wire = Wire.accept(peer, TOKEN)
        frame = wire.receive()
        asked.append(type(frame.body).__name__)
        wire.send(PartWanted(0), frame.call)
        over.wait(LIMIT_S)

    address, stop = play(stop_reading)
    client = PeerClient(address, TOKEN, None, idle_s=1.0)
    try:
        with pytest.raises(RetryableError, match="broke off: timed out"):
            client.put(DIRECTORY, 1, saved, timeout_s=100 * LIMIT_S)
    finally:
        over.set()
        stop()
    assert asked[0] == "PartPut"


def test_a_slow_peer_is_not_given_up_while_it_goes_on() -> None:
    """All of it takes longer than silence may last."""
    ours, theirs = socket.socketpair()
    pause = threading.Event()
    data = os.urandom(400 * 1024)
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sending = pool.submit(Wire(ours, idle_s=3.0).send_view, memoryview(data))
        received = bytearray()
        while len(received) < len(data):
            received += theirs.recv(10 * 1024)
            pause.wait(0.1)
        sending.result(LIMIT_S)
    assert received == data


# ---- parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_a_lost_node_is_rebuilt_over_the_network(
    start: Callable[..., Node], target: Callable[[int], Slot], nodes: int
) -> None:
    """Every node adds its stripes at the same time; then one node's memory is gone."""
    group = [start() for _ in range(nodes)]
    saved = [
        node.shelf.save({"w": os.urandom(300_000 * rank + 7)}, rank_part(rank))
        for rank, node in enumerate(group)
    ]
    (ranks,) = blocks_of([[rank] for rank in range(nodes)])

    def spread(rank: int) -> None:
        for keeper, node in enumerate(group):
            if keeper != rank:
                block = Block(keeper, ranks)
                node.client().put_stripe(DIRECTORY, 1, saved[rank], block, LIMIT_S)

    with ThreadPoolExecutor(nodes) as pool:
        list(pool.map(spread, range(nodes)))
    for lost in range(nodes):
        others = [node for place, node in enumerate(group) if place != lost]
        places = {name: node for node in others for name in node.shelf.sealed}
        blocks = [name for name in places if Block.parse(name)]
        (needed,) = rebuildable(places.keys() - set(blocks), blocks).values()
        with contextlib.ExitStack() as stack:
            readers = {
                name: stack.enter_context(
                    places[name]
                    .client()
                    .reader(
                        PartGet(DIRECTORY, VERSION, name, parity=name.startswith("parity")), LIMIT_S
                    )
                )
                for name in needed
            }
            meta, digest = rebuild(rank_part(lost), readers, target)
        assert meta == saved[lost].slot.read()
        with saved[lost].slot.data[: meta.data_length] as data:
            assert digest == digest_of(data)


# ---- who may talk to whom --------------------------------------------------------------------


def test_a_wrong_token(node: Node) -> None:
    node.shelf.save(contents(10))
    with pytest.raises(AuthError, match="wrong token"):
        node.client(token=b"fedcba9876543210").look(GET, LIMIT_S)


def test_a_server_with_a_wrong_token() -> None:
    def serve(peer: socket.socket) -> None:
        Wire.accept(peer, b"fedcba9876543210")

    address, stop = play(serve)
    try:
        with pytest.raises(AuthError, match="wrong token"):
            PeerClient(address, TOKEN, None).look(GET, LIMIT_S)
    finally:
        stop()


def test_another_version_of_the_protocol(node: Node) -> None:
    with socket.create_connection(("127.0.0.1", node.server.port), LIMIT_S) as peer:
        wire = Wire(peer, time.monotonic() + LIMIT_S)
        challenge = wire.receive().body
        assert isinstance(challenge, m.Challenge)
        nonce = os.urandom(codec.NONCE_BYTES)
        mac = codec.client_mac(TOKEN, challenge.nonce, nonce)
        wire.send(m.Proof(m.VERSION + 1, nonce, mac), 0)
        assert wire.receive().body == m.Refused("usage", "protocol 2 is not 1")


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\x04\0\0\0abcd"])
def test_garbage_is_cut_off_and_others_are_served(node: Node, garbage: bytes) -> None:
    node.shelf.save(contents(10))
    with socket.create_connection(("127.0.0.1", node.server.port), LIMIT_S) as peer:
        peer.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
    assert node.client().look(GET, LIMIT_S).holding.part == PART


def test_a_request_that_is_none_of_a_peer(node: Node) -> None:
    wire = Wire.connect(node.server.address, TOKEN, None, time.monotonic() + LIMIT_S)
    with wire, pytest.raises(ConnectionResetError):
        wire.ask(m.KvAdd(0, "count", 1))


def test_silent_connections_do_not_keep_others_out(start: Callable[..., Node]) -> None:
    node = start(idle_s=IMPATIENT_S)
    node.shelf.save(contents(10))
    with contextlib.ExitStack() as stack:
        for _ in range(2 * ANSWERS_MAX):
            address = ("127.0.0.1", node.server.port)
            stack.enter_context(socket.create_connection(address, LIMIT_S))
        assert node.client().look(GET, LIMIT_S).holding.part == PART


def test_many_at_once(node: Node, target: Callable[[int], Slot]) -> None:
    saved = node.shelf.save(contents(MB))
    slots = [target(saved.offer.holding.length) for _ in range(3 * ANSWERS_MAX)]
    with ThreadPoolExecutor(len(slots)) as pool:
        client = node.client()
        list(pool.map(lambda slot: client.fetch(GET, saved.offer, slot, LIMIT_S), slots))
    assert all(bytes(slot.data[: saved.offer.total]) == image(saved) for slot in slots)


def test_closing_breaks_off_what_is_under_way(start: Callable[..., Node]) -> None:
    node = start(idle_s=LIMIT_S)
    with Wire.connect(node.server.address, TOKEN, None, time.monotonic() + LIMIT_S) as wire:
        before = {thread.name for thread in threading.enumerate()}
        assert {"peers", "peer"} <= before
        node.server.close()
        assert not {"peers", "peer"} & {thread.name for thread in threading.enumerate()}
        with pytest.raises(OSError, match=r"closed|reset"):
            wire.receive()
