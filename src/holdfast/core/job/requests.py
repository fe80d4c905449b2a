# SPDX-License-Identifier: Apache-2.0
"""Which event a request becomes: frame data in, event out.

The master's service and the simulator's both read this table. Who may send a request, and that the
core answers it, is in protocol/services.py. A request that joins a family (the store's, the data
ledger's, the checkpoint ledger's) has its event already; any other gets a line here.
"""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

from holdfast.core.job import events as ev
from holdfast.core.kernel import Event
from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointCall
from holdfast.protocol.data import DataCall, DataMarked

NO_NODE = NodeId(-1)
"""In the event of a request that came from no node."""

Body = TypeVar("Body", bound=m.Message)
Maker = Callable[[NodeId, int, m.Frame, Body], Event | None]
"""Node, number of the link, frame and its body; None if this body says nothing."""

_STORE_CALLS: tuple[type[m.KvCall], ...] = get_args(m.KvCall)
_DATA_CALLS: tuple[type[DataCall], ...] = get_args(DataCall)
_CHECKPOINT_CALLS: tuple[type[CheckpointCall], ...] = get_args(CheckpointCall)


def event_of(node_id: NodeId | None, link: int, frame: m.Frame) -> Event | None:
    """What a frame is to the core; None if it is no request that the core answers.

    `node_id` is None on a link that is no admitted agent's.
    """
    make = MAKERS.get(type(frame.body))
    if make is None:
        return None
    return make(NO_NODE if node_id is None else node_id, link, frame, frame.body)


def _attach(node_id: NodeId, link: int, frame: m.Frame, body: m.Attach) -> Event:
    return ev.AttachRequested(link, frame.call, body)


def _started(node_id: NodeId, link: int, frame: m.Frame, body: m.WorkersStarted) -> Event:
    return ev.StartReported(node_id, link, frame.call, body)


def _store_offered(node_id: NodeId, link: int, frame: m.Frame, body: m.StoreOffered) -> Event:
    return ev.StoreOffered(node_id, link, frame.call, body.port)


def _warmed(node_id: NodeId, link: int, frame: m.Frame, body: m.Warmed) -> Event:
    return ev.NodeWarmed(node_id, link, frame.call)


def _failed(node_id: NodeId, link: int, frame: m.Frame, body: m.WorkersFailed) -> Event | None:
    # A report without failures has none that could be the cause.
    return ev.FailureReported(node_id, link, frame.call, body) if body.failures else None


def _done(node_id: NodeId, link: int, frame: m.Frame, body: m.WorkersDone) -> Event:
    return ev.DoneReported(node_id, link, frame.call, body)


def _leave(node_id: NodeId, link: int, frame: m.Frame, body: m.Leave) -> Event:
    return ev.LeaveRequested(node_id, link, frame.call, body.reason)


def _stop(node_id: NodeId, link: int, frame: m.Frame, body: m.StopJob) -> Event:
    return ev.StopRequested(link, frame.call, body.reason)


def _store_call(node_id: NodeId, link: int, frame: m.Frame, body: m.KvCall) -> Event:
    return ev.KvRequested(node_id, link, frame.call, frame.session, frame.seq, body)


def _data_call(node_id: NodeId, link: int, frame: m.Frame, body: DataCall) -> Event:
    return ev.DataRequested(node_id, link, frame.call, frame.session, frame.seq, body)


def _data_marked(node_id: NodeId, link: int, frame: m.Frame, body: DataMarked) -> Event:
    return ev.DataMarks(node_id, link, frame.call, body)


def _checkpoint_call(node_id: NodeId, link: int, frame: m.Frame, body: CheckpointCall) -> Event:
    return ev.CheckpointRequested(node_id, link, frame.call, body)


def _by(make: Maker[Body], *kinds: type[Body]) -> dict[type[m.Message], Maker[Any]]:
    """Lines of the table; mypy compares the maker with the kinds here, once and for all."""
    return dict.fromkeys(kinds, make)


MAKERS: dict[type[m.Message], Maker[Any]] = {
    **_by(_attach, m.Attach),
    **_by(_started, m.WorkersStarted),
    **_by(_store_offered, m.StoreOffered),
    **_by(_warmed, m.Warmed),
    **_by(_failed, m.WorkersFailed),
    **_by(_done, m.WorkersDone),
    **_by(_leave, m.Leave),
    **_by(_stop, m.StopJob),
    **_by(_store_call, *_STORE_CALLS),
    **_by(_data_call, *_DATA_CALLS),
    **_by(_data_marked, DataMarked),
    **_by(_checkpoint_call, *_CHECKPOINT_CALLS),
}
