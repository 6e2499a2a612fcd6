"""What every request passes first: who asks, how much is written, and how long it all takes."""

import hmac
import logging
import time

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.serving.metrics import Metrics
from megatron.serving.openai_records import error_record

log = logging.getLogger(__name__)


OPEN_PATHS = ("/", "/health")
"""What is told without an API key."""


class Gate:
    """Asks for the API key, bounds the body, counts and logs; then `app` answers.

    Args:
        api_key: what requests must bear; None for nothing.
        paths: those whose requests are counted by name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        body_bytes: int,
        metrics: Metrics,
        paths: frozenset[str],
    ):
        self.app, self.body_bytes, self.metrics, self.paths = app, body_bytes, metrics, paths
        self._bearer = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; other messages pass."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path, method = scope["path"], scope["method"]
        try:
            await self._pass(scope, receive, sending)
        finally:
            took_s = time.monotonic() - started_at
            self.metrics.answered(path if path in self.paths else "other", status, took_s)
            if path in self.paths and not scope.get("state", {}).get("no_log"):
                told = status or "the client left"
                log.info("%s %s | status: %s | time: %.3f s", method, path, told, took_s)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        path = scope["path"]
        if path not in OPEN_PATHS and not self._is_known(headers.get(b"authorization", b"")):
            message = "this server asks for the header Authorization: Bearer API-KEY"
            refusal = refused(path, 401, message)
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told[:20]) > self.body_bytes:
            await refused(path, 413, self._too_large)(scope, receive, send)
            return
        length = 0

        async def receiving() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self.body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        await self.app(scope, receiving, send)

    def _is_known(self, authorization: bytes) -> bool:
        # In constant time: how far a guess is right must not show.
        return self._bearer is None or hmac.compare_digest(authorization, self._bearer)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self.body_bytes} bytes"


def refused(path: str, status: int, message: str, *, code: str | None = None) -> JSONResponse:
    """Return an error in the shape of the interface that the path belongs to."""
    is_openai = path.startswith("/v1/")
    record = error_record(message, status=status, code=code) if is_openai else {"error": message}
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(record, status_code=status, headers=headers)
