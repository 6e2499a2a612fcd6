"""HTTP application: API key and body limits, routes of both interfaces, and error handlers."""

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.common.errors import MegatronError
from megatron.common.extensions import declarations_in
from megatron.inference.server.engine_thread import ClientGone, Unavailable
from megatron.inference.server.errors import (
    Responses,
    UnknownModel,
    error_response,
    metrics_responses,
    printable,
    remove_framework_errors,
    unreadable_body,
    validation_message,
)
from megatron.inference.server.hosts import names_this_machine
from megatron.inference.server.megatron_api import add_megatron_api
from megatron.inference.server.metrics import Metrics
from megatron.inference.server.schemas import HealthAnswer
from megatron.inference.server.served_model import ServedModel
from megatron.inference.server.web.pages import GENERATION_PAGE

log = logging.getLogger(__name__)

OPEN_PATHS = ("/", "/health")
"""Paths that need no API key."""

_FOREIGN = (
    "the Host header is {!r}, and this server without an API key answers requests to localhost "
    "alone; set --api-key-file, or let your proxy send Host: localhost"
)

_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}

Interface = Callable[[FastAPI, ServedModel], None]
"""Adds the routes of one interface to the model."""

INTERFACES: Sequence[Interface] = (add_megatron_api, *declarations_in("interface", "INTERFACE"))
"""Interfaces of a language model: PUT /api, and the extensions' (`interface.py`)."""


def build_app(
    served: ServedModel,
    *,
    api_key: str | None,
    is_local: bool = False,
    interfaces: Sequence[Interface] = INTERFACES,
    page: str = GENERATION_PAGE,
) -> ASGIApp:
    """Return the ASGI application.

    Args:
        api_key: required in the Authorization header; None: no key.
        is_local: whether the server listens for this machine alone; see hosts.py.
        interfaces: to the model; the page, /health and /metrics are added to them.
        page: HTML of the page.
    """
    app = FastAPI(title="Megatron-DeepSpeed", docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(served.engine_thread)
    for add_interface in interfaces:
        add_interface(app, served)
    _add_error_handlers(app, _names(app.routes))
    _add_views(app, served, metrics, page)
    remove_framework_errors(app)
    return RequestMiddleware(
        app,
        api_key=api_key,
        is_local=is_local,
        body_bytes=served.limits.body_bytes,
        body_s=served.limits.request_s,
        metrics=metrics,
        paths=frozenset(getattr(route, "path", "") for route in app.routes),
    )


class RequestMiddleware:
    """Checks the API key, limits size and time of the body, counts and logs each request.

    Args:
        api_key: None: no key is required.
        is_local: requires Host headers of this machine, unless there is a key.
        body_bytes: largest body.
        body_s: seconds within which a body must arrive.
        paths: counted and logged by name; requests of other paths are counted as "other".
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        is_local: bool,
        body_bytes: int,
        body_s: float,
        metrics: Metrics,
        paths: frozenset[str],
    ):
        self.app, self.metrics, self.paths = app, metrics, paths
        self.body_bytes, self.body_s = body_bytes, body_s
        self._key = None if api_key is None else api_key.encode()
        self._checks_host = is_local and api_key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request; other ASGI messages go to the application unchanged."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at, status = time.monotonic(), 0

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path, method = scope["path"], scope["method"]
        try:
            await self._check_and_call(scope, receive, send_and_record)
        finally:
            took_s = time.monotonic() - started_at
            self.metrics.count(path if path in self.paths else "other", status, took_s)
            if path in self.paths and not scope.get("state", {}).get("no_log"):
                shown = status or "the client disconnected"
                log.info("%s %s | status: %s | time: %.3f s", method, path, shown, took_s)

    async def _check_and_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        path = scope["path"]
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if self._checks_host and not names_this_machine(host):
            await error_response(path, 403, printable(_FOREIGN.format(host[:60])))(
                scope, receive, send
            )
            return
        if path not in OPEN_PATHS and not self._has_key(headers.get(b"authorization", b"")):
            message = "this server needs the header Authorization: Bearer API-KEY"
            refusal = error_response(path, 401, message)
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        content_length = headers.get(b"content-length", b"0")
        if content_length.isdigit() and int(content_length[:20]) > self.body_bytes:
            await error_response(path, 413, self._too_large)(scope, receive, send)
            return
        length, is_complete = 0, False
        ends_at = time.monotonic() + self.body_s

        async def receive_limited() -> Message:
            nonlocal length, is_complete
            if is_complete:  # the next message is the client's disconnect
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), ends_at - time.monotonic())
            except (TimeoutError, asyncio.TimeoutError):  # one class from Python 3.11 on
                late = f"the body has not arrived within {self.body_s:g} seconds"
                raise HTTPException(408, late) from None
            is_complete = not message.get("more_body", False)
            length += len(message.get("body", b""))
            if length > self.body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        await self.app(scope, receive_limited, send)

    def _has_key(self, authorization: bytes) -> bool:
        if self._key is None:
            return True
        scheme, _, key = authorization.partition(b" ")
        # In constant time: the time must not show how much of a guess is right.
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self.body_bytes} bytes"


def _add_views(app: FastAPI, served: ServedModel, metrics: Metrics, page: str) -> None:
    engine_thread = served.engine_thread

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    health_states: Responses = {status: {"model": HealthAnswer} for status in (200, 503)}

    @app.get("/health", responses=health_states)
    @app.head("/health", include_in_schema=False)
    async def health() -> JSONResponse:
        state = "failed" if engine_thread.failure else "ok" if engine_thread.is_open else "closing"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    @app.get("/metrics", responses=metrics_responses(), response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _names(routes: Sequence[BaseRoute]) -> list[str]:
    """Return method and path of each route, such as PUT /api."""
    return [
        f"{method} {route.path}"
        for route in routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    ]


def _add_error_handlers(app: FastAPI, routes: Sequence[str]) -> None:
    def refuse(http: Request, status: int, message: str, code: str | None = None) -> JSONResponse:
        # Not http.url, which is built from the client's Host header.
        return error_response(http.scope["path"], status, message, code=code)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> JSONResponse:
        return refuse(http, 400, validation_message(error.errors()))

    @app.exception_handler(MegatronError)
    async def impossible(http: Request, error: MegatronError) -> JSONResponse:
        return refuse(http, 400, printable("; ".join(str(error).splitlines())))

    @app.exception_handler(UnknownModel)
    async def unknown(http: Request, error: UnknownModel) -> JSONResponse:
        return refuse(http, 404, printable(str(error)), error.code)

    @app.exception_handler(Unavailable)
    async def unavailable(http: Request, error: Unavailable) -> JSONResponse:
        return refuse(http, 503, str(error))

    @app.exception_handler(ClientGone)
    async def gone(http: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # there is no client to read it

    @app.exception_handler(HTTPException)
    async def other(http: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers or {}
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no such path: use {', '.join(routes)}"
        elif error.status_code == 405:
            message = f"{http.method} is not allowed for this path: use {headers.get('Allow')}"
        elif error.status_code == 400:  # of the framework, which could not parse the body
            message = unreadable_body(error.__cause__)
        refusal = refuse(http, error.status_code, printable(message))
        refusal.headers.update(headers)
        return refusal

    @app.exception_handler(Exception)
    async def unexpected(http: Request, error: Exception) -> JSONResponse:
        return refuse(http, 500, "internal error: see the server's log")
