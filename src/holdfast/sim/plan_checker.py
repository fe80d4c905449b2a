# SPDX-License-Identifier: Apache-2.0
"""Invariants of plans: each plan is done once, the job has the size that was asked for last, and no
worker steps while the job is suspended."""

from collections.abc import Callable

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.order import Plan

STOPPED_S = 60.0
"""A step later than this after a job was suspended is a violation, on whatever node."""


class PlanChecker:
    """Knows the plans, and compares them with what the master writes."""

    def __init__(self, fail: Callable[[str], None], nodes: int) -> None:
        self._fail = fail
        self._asked: dict[str, Plan] = {}
        self._settled: set[str] = set()
        self._nodes = self._wanted = nodes
        #: When the job was suspended; None if it is not suspended.
        self._since: float | None = None
        self.done = 0
        """How many plans were carried out."""
        self.suspended = 0

    def asked(self, plan: Plan) -> None:
        self._asked[plan.plan_id] = plan

    def durable(self, record: Record, now: float) -> None:
        """The master has written this record."""
        match record:
            case rec.JobSized():
                self._nodes = record.nodes
                if not record.suspended:
                    self._since = None
                elif self._since is None:
                    self._since = now
                    self.suspended += 1
            case rec.PlanSettled():
                self._settle(record)
            case rec.WorldAgreed():
                if self._since is not None:
                    self._fail("a world forms while the job is suspended")
                if len(record.world.members) > self._nodes:
                    size = len(record.world.members)
                    self._fail(f"a world has {size} nodes when {self._nodes} were asked for")

    def _settle(self, record: rec.PlanSettled) -> None:
        if record.plan_id in self._settled:
            self._fail(f"{record.plan_id} is settled twice")
        self._settled.add(record.plan_id)
        if not record.ok:
            return
        self.done += 1
        plan = self._asked[record.plan_id]
        self._wanted = self._wanted - len(plan.remove) if plan.nodes is None else plan.nodes
        if self._nodes != self._wanted:
            self._fail(f"the job has {self._nodes} nodes when {self._wanted} were asked for")

    def stepped(self, now: float) -> None:
        """A worker finished a step."""
        if self._since is not None and now > self._since + STOPPED_S:
            self._fail(f"a worker steps {now - self._since:.0f} s after the job was suspended")

    def check_end(self, nodes: object) -> None:
        """The job is over; the master says that it has `nodes` nodes."""
        if self._asked and nodes != self._wanted:
            self._fail(f"the job ended with {nodes} nodes when {self._wanted} were asked for")
