# SPDX-License-Identifier: Apache-2.0
"""The desk port: where people ask for changes of a running job, and read how it stands."""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from holdfast.model.order import Plan


class Desk(Protocol):
    """Takes plans in and shows the job.

    Guarantees: every plan comes at least once, in the order in which it was made, also after the
    master was away; `answer` and `show` are repeated until they are known to have arrived.
    """

    def plans(self) -> AsyncIterator[Plan]:
        """The unanswered plans, then every new one; it ends if the job is taken back."""

    async def answer(self, plan_id: str, *, ok: bool, text: str) -> None:
        """Say what became of a plan: that it is done, or why it cannot be."""

    async def show(self, view: Mapping[str, object]) -> None:
        """Publish how the job stands: the same view as /api/v1/job. Only the newest one matters."""

    async def tell(self, kind: str, text: str) -> None:
        """Publish one thing that happened; `kind` is one word."""

    async def close(self) -> None:
        """Publish what is still waiting, within seconds, and let go of everything."""
