# SPDX-License-Identifier: Apache-2.0
"""Copies on other nodes, as the ledger sees them: what is safe, and what a failed copy leads to.

Prior art: a node whose replica fails leaves all others in a collective until that times out.
"""

from holdfast.core.job import events as ev
from holdfast.model.checkpoint import Version
from holdfast.model.ids import Round
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from tests.core.ledger import DIR, V5, V6, Ledger, member

V7 = Version(0, 7)


def copied(ledger: Ledger, node: int, version: Version) -> int:
    return ledger.call(node, c.Replicated(DIR, ledger.round, version))


def failed(ledger: Ledger, node: int, version: Version, peer: int = -1, replicas: int = 0) -> int:
    """A node's copy did not get through; the number of its call."""
    body = c.CopyFailed(DIR, ledger.round, version, "it has no room", peer, replicas)
    return ledger.call(node, body)


def peers(ledger: Ledger, call: int) -> list[int]:
    return [peer.node_id for peer in ledger.answer(call, c.Peers).peers]


def safe(ledger: Ledger) -> object:
    (view,) = ledger.machine.view()
    return view["safe"]


def confirmed(ledger: Ledger) -> tuple[object, object]:
    (view,) = ledger.machine.view()
    return view["safe"], view["safe_confirmed"]


def told(ledger: Ledger) -> list[str]:
    return [fact.why for fact in ledger.facts if isinstance(fact, ev.CopyFailed)]


# ---- what is safe -------------------------------------------------------------------------------


def test_a_version_is_safe_once_every_node_has_copied_it() -> None:
    ledger = Ledger(3)
    calls = [copied(ledger, node, V5) for node in (0, 1)]
    assert not ledger.answers
    assert safe(ledger) == -1
    calls.append(copied(ledger, 2, V5))
    assert [ledger.answers[call] for call in calls] == [m.Done()] * 3
    assert safe(ledger) == 5


def test_what_was_safe_before_an_incident_is_shown_as_not_confirmed() -> None:
    ledger = Ledger(2)
    for node in (0, 1):
        copied(ledger, node, V5)
    ledger.form((0, 1))
    (view,) = ledger.machine.view()
    assert (view["safe"], view["safe_confirmed"]) == (5, False)
    for node in (0, 1):
        copied(ledger, node, V6)
    (view,) = ledger.machine.view()
    assert (view["safe"], view["safe_confirmed"]) == (6, True)


def test_nobody_waits_for_a_version_that_a_node_has_skipped() -> None:
    ledger = Ledger(2)
    waits = copied(ledger, 0, V5)
    goes_on = copied(ledger, 1, V6)
    assert "node rank 1 has skipped step 5" in ledger.refusal(waits)
    late = copied(ledger, 0, V5)
    assert "step 5 is not waited for any more" in ledger.refusal(late)
    assert goes_on not in ledger.answers
    ledger.answer(copied(ledger, 0, V6), m.Done)
    ledger.answer(goes_on, m.Done)


def test_who_missed_the_answer_gets_it_again() -> None:
    ledger = Ledger(2)
    calls = [copied(ledger, node, V5) for node in (0, 1)]
    ledger.answers.clear()
    ledger.call(0, c.Replicated(DIR, 1, V5), calls[0])
    assert ledger.answers == {calls[0]: m.Done()}


def test_a_new_master_learns_from_the_calls_what_is_copied() -> None:
    """A push that the old master did not send any more would leave its nodes waiting."""
    ledger = Ledger(2)
    first = copied(ledger, 0, V5)
    ledger.restart()
    ledger.call(0, c.Replicated(DIR, 1, V5), first)
    second = copied(ledger, 1, V5)
    assert {call: ledger.answers[call] for call in (first, second)} == {
        first: m.Done(),
        second: m.Done(),
    }


def test_a_new_master_does_not_say_that_nothing_is_copied_before_it_knows() -> None:
    ledger = Ledger(2)
    for node in (0, 1):
        ledger.restore(node)
    assert confirmed(ledger) == (-1, True)
    for node in (0, 1):
        copied(ledger, node, V5)
    assert confirmed(ledger) == (5, True)
    ledger.restart()
    assert confirmed(ledger) == (-1, False)
    for node in (0, 1):
        copied(ledger, node, V6)
    assert confirmed(ledger) == (6, True)
    ledger.restart()
    ledger.form((0, 1))
    assert confirmed(ledger) == (-1, False), "the copies may be what the next round restores"
    for node in (0, 1):
        ledger.restore(node)
    assert confirmed(ledger) == (-1, True), "the ranks went on without them"


def test_a_new_round_waits_for_nothing_of_the_one_before() -> None:
    ledger = Ledger(2)
    waits = copied(ledger, 0, V5)
    ledger.lose(1)
    ledger.form((0, 2))
    assert ledger.answer(waits, m.Refused).kind == "stale"
    stale = ledger.call(2, c.Replicated(DIR, 1, V5))
    assert ledger.answer(stale, m.Refused).kind == "stale"
    for node in (0, 2):
        call = copied(ledger, node, V6)
    ledger.answer(call, m.Done)


# ---- copies that fail ---------------------------------------------------------------------------


def test_another_peer_takes_what_one_could_not() -> None:
    ledger = Ledger(4)
    asked = ledger.call(0, c.PeersAsk(1, replicas=2, parity=0))
    assert peers(ledger, asked) == [1, 2]
    assert peers(ledger, failed(ledger, 0, V5, peer=1, replicas=2)) == [2, 3]
    assert told(ledger) == [
        "node rank 0 could not copy step 5 to node rank 1, its copies go to node rank 2, 3 "
        "from now on: it has no room"
    ]
    # The copy is late, but nothing is given up.
    waits = copied(ledger, 1, V5)
    assert waits not in ledger.answers


def test_who_failed_once_is_passed_over_for_the_rest_of_the_round() -> None:
    ledger = Ledger(4)
    failed(ledger, 0, V5, peer=1, replicas=1)
    assert peers(ledger, failed(ledger, 0, V6, peer=2, replicas=1)) == [3]
    ledger.form((0, 1, 2, 3))
    assert peers(ledger, failed(ledger, 0, V7, peer=3, replicas=1)) == [1]


def test_the_others_do_not_wait_for_a_copy_that_failed() -> None:
    """Before, they waited for a minute: nobody told them."""
    ledger = Ledger(3)
    waits = copied(ledger, 1, V5)
    assert peers(ledger, failed(ledger, 0, V5)) == []
    assert "node rank 0 could not copy step 5: it has no room" in ledger.refusal(waits)
    late = copied(ledger, 2, V5)
    assert "node rank 0 could not copy step 5: it has no room" in ledger.refusal(late)
    for node in range(3):
        call = copied(ledger, node, V6)
    ledger.answer(call, m.Done)
    assert safe(ledger) == 6


def test_what_was_safe_stays_so_and_it_is_said_once() -> None:
    ledger = Ledger(2)
    for node in (0, 1):
        copied(ledger, node, V5)
    for version in (V6, V7):
        assert peers(ledger, failed(ledger, 0, version, peer=1, replicas=1)) == []
    assert safe(ledger) == 5
    assert told(ledger) == [
        "node rank 0 could not copy step 6 to node rank 1: it has no room; training goes on "
        "without, and step 5 stays safe"
    ]
    (view,) = ledger.machine.view()
    assert "step 7 to node rank 1" in str(view["copy_problem"])
    for node in (0, 1):
        copied(ledger, node, Version(0, 8))
    assert ev.CopiesResumed(DIR, Version(0, 8)) in ledger.facts
    (view,) = ledger.machine.view()
    assert view["copy_problem"] == ""


def test_with_the_next_version_every_peer_is_tried_again() -> None:
    ledger = Ledger(2)
    assert peers(ledger, failed(ledger, 0, V5, peer=1, replicas=1)) == []
    assert peers(ledger, ledger.call(0, c.PeersAsk(1, replicas=1, parity=0))) == [1]
    assert peers(ledger, failed(ledger, 0, V6, peer=7, replicas=1)) == [1]


def test_peers_are_not_tried_without_end() -> None:
    ledger = Ledger(20)
    answers = [peers(ledger, failed(ledger, 0, V5, peer=n, replicas=1)) for n in range(1, 6)]
    assert answers == [[2], [3], [4], [5], []]


def test_a_failure_that_comes_late_changes_nothing() -> None:
    ledger = Ledger(2)
    for node in (0, 1):
        copied(ledger, node, V5)
    waits = copied(ledger, 1, V6)
    assert peers(ledger, failed(ledger, 0, V5, peer=1, replicas=1)) == []
    assert safe(ledger) == 5
    assert waits not in ledger.answers
    assert told(ledger) == []
    stale = ledger.call(0, c.CopyFailed(DIR, 0, V6, "it has no room"))
    assert ledger.answer(stale, m.Refused).kind == "stale"


# ---- addresses ----------------------------------------------------------------------------------


def test_peers_are_named_with_their_addresses() -> None:
    ledger = Ledger(3)
    call = ledger.call(1, c.PeersAsk(1, replicas=1, parity=0))
    assert ledger.answer(call, c.Peers).peers == (c.Peer(2, "host-2:7000", 2, nproc=1),)
    group = ledger.call(1, c.PeersAsk(1, replicas=0, parity=3))
    assert peers(ledger, group) == [0, 1, 2]
    stale = ledger.call(1, c.PeersAsk(0, replicas=1, parity=0))
    assert ledger.refusal(stale) == "round 0 is over"


def test_a_certificate_goes_with_every_address() -> None:
    ledger = Ledger(2)
    secured = member(0, certificate="ab" * 32)
    ledger.feed(ev.NodeReady(secured, Round(1), returned=True))
    (peer,) = ledger.answer(ledger.call(1, c.PeersAsk(1, replicas=1, parity=0)), c.Peers).peers
    assert peer.address == "host-0:7000#" + "ab" * 32
