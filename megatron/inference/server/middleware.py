"""What every request passes first: API key, limits of its body, metrics and log line."""

import asyncio
import hmac
import logging
import time

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.inference.server.metrics import Metrics
from megatron.inference.server.openai.records import error_record

log = logging.getLogger(__name__)


OPEN_PATHS = ("/", "/health")
"""What is told without an API key."""


class Gate:
    """Checks the API key, bounds the body, counts and logs; then `app` answers.

    Args:
        api_key: what requests must bear; None for nothing.
        body_bytes: most bytes of a body.
        body_s: seconds within which a body must arrive.
        paths: those whose requests are counted by name.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_key: str | None,
        body_bytes: int,
        body_s: float,
        metrics: Metrics,
        paths: frozenset[str],
    ):
        self.app, self.metrics, self.paths = app, metrics, paths
        self.body_bytes, self.body_s = body_bytes, body_s
        self._key = None if api_key is None else api_key.encode()

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
        length, is_over = 0, False
        ends_at = time.monotonic() + self.body_s

        async def receiving() -> Message:
            nonlocal length, is_over
            if is_over:  # what comes next is that the client leaves
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), ends_at - time.monotonic())
            except (TimeoutError, asyncio.TimeoutError):  # one class from Python 3.11 on
                raise HTTPException(408, self._too_late) from None
            is_over = not message.get("more_body", False)
            length += len(message.get("body", b""))
            if length > self.body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        await self.app(scope, receiving, send)

    def _is_known(self, authorization: bytes) -> bool:
        if self._key is None:
            return True
        scheme, _, key = authorization.partition(b" ")
        # In constant time: how far a guess is right must not show.
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"

    @property
    def _too_late(self) -> str:
        return f"the body has not arrived within {self.body_s:g} seconds"

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self.body_bytes} bytes"


def refused(path: str, status: int, message: str, *, code: str | None = None) -> JSONResponse:
    """Return an error in the shape of the interface that the path belongs to."""
    is_openai = path.startswith("/v1/")
    record = error_record(message, status=status, code=code) if is_openai else {"error": message}
    headers = {503: {"Retry-After": "1"}, **dict.fromkeys((408, 413), {"Connection": "close"})}
    return JSONResponse(record, status_code=status, headers=headers.get(status))
