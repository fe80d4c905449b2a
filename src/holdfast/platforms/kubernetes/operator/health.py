# SPDX-License-Identifier: Apache-2.0
"""What an operator answers to the probes of Kubernetes, over HTTP.

The event loop that does all the work answers /healthz: an answer means that it runs. /readyz says
whether the operator would act now: it leads and has listed everything it looks after, or it stands
by and knows that another one leads. An operator that stands by is ready, or no rollout of two of
them would ever end.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from holdfast.platforms.kubernetes.operator.leader import Leadership
from holdfast.platforms.kubernetes.operator.process import Operator
from holdfast.runtime.http import explain

UNAVAILABLE = 503

_INDEX = """\
Holdfast operator
GET /healthz   whether it runs
GET /readyz    whether it leads or stands by, or what it still waits for
"""


class Health:
    """The HTTP application, and the objects that its answers come from."""

    def __init__(self, leadership: Leadership) -> None:
        self._leadership = leadership
        self.operator: Operator | None = None
        """The operator that acts, while this process leads."""

    def application(self) -> ASGIApp:
        async def index(request: Request) -> Response:
            return PlainTextResponse(_INDEX)

        async def healthz(request: Request) -> Response:
            return JSONResponse({"ok": True})

        async def readyz(request: Request) -> Response:
            missing, role = self._missing(), "leads" if self._leadership.leads else "stands by"
            answer = {"ok": not missing, "role": role, "waits for": missing}
            return JSONResponse(answer, UNAVAILABLE if missing else 200)

        return Starlette(
            routes=[Route("/", index), Route("/healthz", healthz), Route("/readyz", readyz)],
            exception_handlers={HTTPException: explain},
        )

    def _missing(self) -> list[str]:
        """What this operator must still see to be of use; empty if nothing is missing."""
        if not self._leadership.leads:
            return [] if self._leadership.knows_leader else ["the lease"]
        return ["the jobs"] if self.operator is None else self.operator.unlisted()
