# SPDX-License-Identifier: Apache-2.0
"""The table of requests, and the one of the events they become: complete, and of one mind."""

import typing

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job.flow import build
from holdfast.core.job.requests import MAKERS, NO_NODE, event_of
from holdfast.core.kernel import Event
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.protocol import checkpoints as c
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.protocol.services import METHODS, Answerer, Sender, may_send
from tests.wire.samples import MESSAGES

NODE, LINK, CALL, SESSION, SEQ = NodeId(3), 5, 7, "worker 2", 11

EVENTS: dict[type[Event], set[type]] = {
    ev.AttachRequested: {m.Attach},
    ev.StartReported: {m.WorkersStarted},
    ev.StoreOffered: {m.StoreOffered},
    ev.NodeWarmed: {m.Warmed},
    ev.FailureReported: {m.WorkersFailed},
    ev.DoneReported: {m.WorkersDone},
    ev.LeaveRequested: {m.Leave},
    ev.StopRequested: {m.StopJob},
    ev.DataMarks: {d.DataMarked},
    ev.KvRequested: set(typing.get_args(m.KvCall)),
    ev.DataRequested: set(typing.get_args(d.DataCall)),
    ev.CheckpointRequested: set(typing.get_args(c.CheckpointCall)),
}


def answered_by(answerer: Answerer) -> set[type]:
    return {kind for kind, method in METHODS.items() if method.answerer is answerer}


def may_be_sent_by(sender: Sender) -> set[type]:
    return {kind for kind, method in METHODS.items() if sender in method.senders}


def frame_of(body: m.AnyMessage) -> m.Frame:
    return m.Frame(CALL, body, SESSION, SEQ)


def test_every_request_has_one_row_and_an_answer() -> None:
    assert set(METHODS) == set(typing.get_args(m.Call))
    assert {method.answer for method in METHODS.values()} <= set(typing.get_args(m.Answer))
    assert all(kind is method.request for kind, method in METHODS.items())


def test_every_request_that_the_core_answers_has_a_maker_and_no_other_has() -> None:
    assert set(MAKERS) == answered_by(Answerer.CORE)


def test_every_family_stands_in_the_table_as_one() -> None:
    """What the answerers match over are these unions."""
    assert answered_by(Answerer.VAULT) == set(typing.get_args(c.VaultCall))
    assert answered_by(Answerer.PEER) == set(typing.get_args(c.PeerCall))
    assert answered_by(Answerer.SERVICE) == {m.Beat, m.Observe, m.HistoryAsk, m.Parting}


def test_what_a_worker_may_send_reaches_the_vault_or_the_core() -> None:
    of_workers = may_be_sent_by(Sender.WORKER)
    assert of_workers == set(typing.get_args(m.KvCall | d.DataCall | c.VaultCall))
    assert of_workers <= answered_by(Answerer.VAULT) | answered_by(Answerer.CORE)


def test_without_an_admitted_agent_only_the_store_is_open() -> None:
    """Leases of data go back when their node is lost: there must be one."""
    store = set(typing.get_args(m.KvCall))
    assert may_be_sent_by(Sender.ANYONE) == {m.Attach, m.Observe, m.HistoryAsk, m.StopJob, *store}


@pytest.mark.parametrize("body", MESSAGES, ids=lambda body: type(body).__name__)
def test_a_frame_becomes_the_event_of_its_family(body: m.AnyMessage) -> None:
    event = event_of(NODE, LINK, frame_of(body))
    kinds = [kind for kind, requests in EVENTS.items() if type(body) in requests]
    assert [type(event)] == (kinds or [type(None)])
    if event is None:
        assert type(body) not in answered_by(Answerer.CORE)
        return
    assert type(event) in build(JobSpec(), "job").core.routes()
    said = {name: getattr(event, name) for name in type(event).__match_args__}
    assert (said["link"], said["call"]) == (LINK, CALL)
    assert said.get("node_id", NODE) == NODE
    assert (said.get("session", SESSION), said.get("seq", SEQ)) == (SESSION, SEQ)
    for name in ("attach", "report", "body"):
        assert said.get(name, body) is body
    for name in ("port", "reason"):
        assert said.get(name) == getattr(body, name, None)


def test_a_request_of_a_tool_is_that_of_no_node() -> None:
    event = event_of(None, LINK, frame_of(m.KvCount(0)))
    assert event == ev.KvRequested(NO_NODE, LINK, CALL, SESSION, SEQ, m.KvCount(0))


def test_a_report_of_no_failure_says_nothing() -> None:
    assert event_of(NODE, LINK, frame_of(m.WorkersFailed(1, ()))) is None


@pytest.mark.parametrize("body", [m.Done(), m.Dropped("s", 1), m.StopWork(1, "over")])
def test_what_is_no_request_may_be_sent_as_one_by_no_sender(body: m.AnyMessage) -> None:
    assert not any(may_send(sender, body) for sender in Sender)
