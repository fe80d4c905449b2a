# SPDX-License-Identifier: Apache-2.0
"""Agents under TLS: each has a certificate of its own, and others accept that one and no other."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.peers import PeerClient
from holdfast.checkpoint.slots import Slot
from holdfast.model.errors import AuthError, RetryableError
from holdfast.runtime.tls import new_identity
from tests.integration.jobs import Jobs
from tests.integration.peer_nodes import (
    DIRECTORY,
    GET,
    LIMIT_S,
    MB,
    PART,
    TOKEN,
    Node,
    contents,
    fetch,
    image,
    started_in,
    targets_in,
)
from tests.integration.test_bad_input import self_signed
from tests.integration.test_vault import VAULTED, sources
from tests.integration.test_vault import start as vault_env

IMPATIENT_S = 1.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    with started_in(tmp_path) as start:
        yield start


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Callable[[int], Slot]]:
    with targets_in(tmp_path) as target:
        yield target


def test_parts_go_both_ways(start: Callable[..., Node], target: Callable[[int], Slot]) -> None:
    """Each agent has a certificate of its own, and others accept that one and no other."""
    ours, theirs = new_identity(), new_identity()
    node, keeper = start(tls=ours.tls, idle_s=2.0), start(tls=theirs.tls)
    saved = node.shelf.save(contents(5 * MB))
    address = node.server.address
    slot = fetch(PeerClient(address, TOKEN, ours.fingerprint), target)
    assert bytes(slot.data[: saved.offer.total]) == image(saved)
    PeerClient(keeper.server.address, TOKEN, theirs.fingerprint).put(DIRECTORY, 1, saved, LIMIT_S)
    assert image(keeper.shelf.sealed[PART]) == image(saved)
    with pytest.raises(RetryableError):
        PeerClient(address, TOKEN, None, idle_s=IMPATIENT_S).look(GET, LIMIT_S)
    with pytest.raises(AuthError, match="token"):
        PeerClient(address, b"another token", ours.fingerprint).look(GET, LIMIT_S)
    plain = start().server.address
    with pytest.raises(RetryableError, match=r"WRONG_VERSION_NUMBER|record layer|EOF"):
        PeerClient(plain, TOKEN, ours.fingerprint, IMPATIENT_S).look(GET, LIMIT_S)


def test_another_certificate_is_refused_at_once(start: Callable[..., Node]) -> None:
    """Whoever stands in between is not spoken to: not even the challenge of the token is heard."""
    expected, shown = new_identity(), new_identity()
    node = start(tls=shown.tls)
    began = time.monotonic()
    with pytest.raises(AuthError) as refused:
        PeerClient(node.server.address, TOKEN, expected.fingerprint).look(GET, LIMIT_S)
    assert str(refused.value) == (
        f"{node.server.address} shows another certificate than its agent told the master "
        f"({shown.fingerprint[:16]}... instead of {expected.fingerprint[:16]}...)"
    )
    assert time.monotonic() - began < LIMIT_S / 2


def test_no_two_agents_have_the_same_certificate_and_no_key_is_left_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    assert new_identity().fingerprint != new_identity().fingerprint
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_lost_node_is_restored_from_its_peer(jobs: Jobs, tmp_path: Path) -> None:
    """Nothing more is asked of the user than the master's certificate."""
    certificate, key = self_signed(tmp_path, "ours")
    secure = ("--tls-cert", str(certificate), "--tls-key", str(key), "--http", "off")
    master = jobs.master(*secure)
    words = ("--tls-ca", str(certificate), "--nnodes", "2", "--nproc-per-node", "1", VAULTED)
    env = vault_env(jobs, VAULT_SHARED="0", VAULT_SLOTS="3", VAULT_REPLICAS="1")
    memories = [tmp_path / f"memory-{name}" for name in "ab"]
    for name, memory in zip("ab", memories, strict=True):
        memory.mkdir()
        lost = jobs.node(master, *words, name=name, **{**env, "HOLDFAST_MEMORY_DIR": str(memory)})
    jobs.wait_for("step", lambda event: event.step >= 6, count=2)
    reached = max(event.step for event in jobs.events("step"))
    jobs.kill_all(node="b")
    lost.wait()
    shutil.rmtree(memories[1])
    memories[1].mkdir()
    jobs.node(master, *words, name="b2", **{**env, "HOLDFAST_MEMORY_DIR": str(memories[1])})
    again = jobs.wait_for("restored", lambda event: event.round > 1, count=2)
    assert len({event.step for event in again}) == 1
    assert again[0].step >= reached - 4
    assert sources(jobs, round=again[0].round) == {"memory", "peer"}
    jobs.finish()
    jobs.wait_for("end", lambda event: event.round == again[0].round, count=2)
