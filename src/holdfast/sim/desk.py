# SPDX-License-Identifier: Apache-2.0
"""Where people ask for changes of a running job, as ports/desk.py promises it: every plan comes at
least once and in order. One whose answer was lost comes again, also to the next master."""

from collections.abc import Callable
from random import Random

from holdfast.model.order import Plan
from holdfast.sim.clock import Clock

AGAIN_S = 30.0
"""How long a plan whose answer was lost waits before it is told again."""

Tell = Callable[[Plan], None]


class Desk:
    """Plans that are not answered yet."""

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
        """A new master: it is told every plan that is not answered."""
        self._tell = tell
        for plan in self._open.values():
            self._bring(plan)

    def _bring(self, plan: Plan) -> None:
        tell = self._tell
        self._arrives_at = max(self._arrives_at, self._clock.now + self._rng.uniform(0.0, 0.5))
        self._clock.at(self._arrives_at, lambda: tell(plan))

    def answer(self, plan_id: str) -> None:
        """The master says what became of a plan; every other answer does not arrive."""
        plan = self._open.get(plan_id)
        if plan is None:
            return
        if self._rng.random() < 0.5:
            self._clock.after(AGAIN_S, lambda: self._bring(plan))
        else:
            del self._open[plan_id]
