# SPDX-License-Identifier: Apache-2.0
"""Everything the master's core can ask its driver to do."""

from dataclasses import dataclass

from holdfast.core.kernel import Command
from holdfast.model.ids import NodeId
from holdfast.model.order import Order
from holdfast.protocol import messages as m


@dataclass(frozen=True, slots=True)
class Reply(Command):
    """Answer a call on a link; nothing happens if the link is gone."""

    link: int
    call: int
    body: m.Answer


@dataclass(frozen=True, slots=True)
class Bind(Command):
    """From now on, pushes to this node go to this link; an older link of it is closed."""

    node_id: NodeId
    link: int


@dataclass(frozen=True, slots=True)
class Push(Command):
    """Send to the node's link, if it has one."""

    node_id: NodeId
    body: m.Push


@dataclass(frozen=True, slots=True)
class Drop(Command):
    """Close the node's link once what was pushed before has been sent."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class LaunchNode(Command):
    order: Order


@dataclass(frozen=True, slots=True)
class RemoveNode(Command):
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class AnswerPlan(Command):
    """Say at the desk what became of a plan."""

    plan_id: str
    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class FinishJob(Command):
    """Tell every attached agent, and end the master once they have gone."""

    end: m.JobEnded
