# SPDX-License-Identifier: Apache-2.0
"""The requests of people for changes of a running job, as ports/desk.py promises them: every plan
arrives at least once and in order. A plan whose answer was lost arrives again, also at the next
master."""

from collections.abc import Callable
from random import Random

from holdfast.model.order import Plan
from holdfast.sim.clock import Clock

AGAIN_S = 30.0
"""How long a plan whose answer was lost waits before it is delivered again."""

Tell = Callable[[Plan], None]


class Desk:
    """Plans without an answer yet."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._tell: Tell = lambda plan: None
        self._open: dict[str, Plan] = {}
        self._arrives_at = 0.0

    def ask(self, plan: Plan) -> None:
        self._open[plan.plan_id] = plan
        self._bring(plan)

    def watch(self, tell: Tell) -> None:
        """A new master: deliver it every plan without an answer."""
        self._tell = tell
        for plan in self._open.values():
            self._bring(plan)

    def _bring(self, plan: Plan) -> None:
        tell = self._tell
        self._arrives_at = max(self._arrives_at, self._clock.now + self._rng.uniform(0.0, 0.5))
        self._clock.at(self._arrives_at, lambda: tell(plan))

    def answer(self, plan_id: str) -> None:
        """The master says what became of a plan; half of the answers are lost."""
        plan = self._open.get(plan_id)
        if plan is None:
            return
        if self._rng.random() < 0.5:
            self._clock.after(AGAIN_S, lambda: self._bring(plan))
        else:
            del self._open[plan_id]
