# SPDX-License-Identifier: Apache-2.0
"""The master's side for people and tools: HTTP with JSON state, metrics and health.

It answers questions and takes no orders: every route is a GET, and no request body is ever read.
"""

import hashlib
import hmac
import ssl
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.master.metrics import CONTENT_TYPE, Metrics
from holdfast.protocol import messages as m
from holdfast.runtime.http import PROVED, HttpServer, explain

View = Callable[[], dict[str, object]]

_INDEX = """\
Holdfast master
GET /healthz      whether the master serves
GET /metrics      for Prometheus
GET /api/v1/job   the job as JSON; needs Authorization: Bearer KEY (see docs/http.md)
GET /api/v1/history/ENTITY   what was told of it, as JSON: node/3, round/7, step/100, dataset/NAME
"""


def http_key(token: bytes) -> str:
    """What a client of /api shows: derived from the job's token, which itself is never sent."""
    return hmac.new(token, b"holdfast/http", hashlib.sha256).hexdigest()


async def serve(
    listen: str,
    view: View,
    token: bytes,
    *,
    history: Callable[[str], m.History] = lambda entity: m.History(()),
    tls: ssl.SSLContext | None = None,
) -> HttpServer:
    """Serve on "HOST:PORT" what these show, to clients that have the key of this token."""
    application = _guarded(_application(view, history), http_key(token))
    return await HttpServer.start(listen, application, tls=tls)


def _application(view: View, history: Callable[[str], m.History]) -> ASGIApp:
    metrics = Metrics(view)

    async def index(request: Request) -> Response:
        return PlainTextResponse(_INDEX)

    async def healthz(request: Request) -> Response:
        return JSONResponse({"ok": True})

    async def job(request: Request) -> Response:
        return Response(msgspec.json.encode(view()), media_type="application/json")

    async def history_of(request: Request) -> Response:
        found = history(request.path_params["entity"])
        shown = {
            "stories": [
                {"at_s": round(story.at_s, 3), "kind": story.kind, "text": story.text}
                | story.fields
                for story in found.stories
            ],
            "entities": found.entities,
        }
        status = 200 if found.stories else 404
        return Response(msgspec.json.encode(shown), status, media_type="application/json")

    async def metrics_text(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return Starlette(
        routes=[
            Route("/", index),
            Route("/healthz", healthz),
            Route("/metrics", metrics_text),
            Route("/api/v1/job", job),
            Route("/api/v1/history/{entity:path}", history_of),
        ],
        exception_handlers={HTTPException: explain},
    )


def _guarded(application: ASGIApp, key: str) -> ASGIApp:
    """Let requests below /api through only if they show the key."""
    expected = f"Bearer {key}".encode()

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/api/"):
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, expected):
                refusal = JSONResponse(
                    {"error": "this needs the header Authorization: Bearer KEY (docs/http.md)"},
                    401,
                    {"www-authenticate": "Bearer"},
                )
                await refusal(scope, receive, send)
                return
            scope["state"][PROVED]()
        await application(scope, receive, send)

    return serve
