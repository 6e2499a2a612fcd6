"""The server's paths, and what every mistake is answered with."""

import time
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.common.errors import MegatronError
from megatron.inference.server import megatron_api
from megatron.inference.server.engine_thread import Unavailable
from megatron.inference.server.metrics import Metrics
from megatron.inference.server.middleware import Gate, refused
from megatron.inference.server.openai.chat_completions import ChatRequest
from megatron.inference.server.openai.completions import CompletionRequest
from megatron.inference.server.openai.records import UnknownModel, model_record, require_model
from megatron.inference.server.openai.request import OpenAIRequest
from megatron.inference.server.openai.request_schemas import ChatBody, CompletionBody
from megatron.inference.server.openai.response_schemas import (
    ChatAnswer,
    CompletionAnswer,
    HealthAnswer,
    MegatronAnswer,
    ModelAnswer,
    ModelsAnswer,
)
from megatron.inference.server.openapi import (
    Responses,
    describe,
    of_megatron,
    of_metrics,
    of_openai,
)
from megatron.inference.server.pending_requests import ClientGone, InFlight, while_connected
from megatron.inference.server.request_errors import printable, reasons, unreadable_body
from megatron.inference.server.schemas import MegatronBody
from megatron.inference.server.served_model import ServedModel

_PAGE = Path(__file__).with_name("page.html")
_NO_PATH = (
    "there is no such path: write PUT /api, POST /v1/completions or POST /v1/chat/completions"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


class _Stream(StreamingResponse):
    """An answer in parts; what is left of it is cancelled when the client leaves."""

    def __init__(self, jobs: InFlight, request: OpenAIRequest):
        super().__init__(request.stream(jobs), media_type="text/event-stream")
        self._jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._jobs:
            await super().__call__(scope, receive, send)


def build_app(served: ServedModel, *, api_key: str | None) -> ASGIApp:
    """Return the ASGI application.

    Args:
        api_key: what requests must bear; None for nothing.
    """
    app = FastAPI(title="Megatron-DeepSpeed", docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(served.engine_loop)
    _add_interfaces(app, served)
    _add_views(app, served, metrics)
    _add_errors(app)
    describe(app)
    return Gate(
        app,
        api_key=api_key,
        body_bytes=served.limits.body_bytes,
        body_s=served.limits.request_s,
        metrics=metrics,
        paths=frozenset(getattr(route, "path", "") for route in app.routes),
    )


def _add_interfaces(app: FastAPI, served: ServedModel) -> None:
    started_at = time.time()

    @app.put("/api", responses=of_megatron(MegatronAnswer))
    async def api(body: MegatronBody, http: Request) -> JSONResponse:
        http.state.no_log = body.no_log
        return JSONResponse(await while_connected(http, lambda: megatron_api.answer(served, body)))

    async def answer(request: OpenAIRequest, http: Request) -> Response:
        if request.body.stream:
            return _Stream(InFlight(served.engine_loop, request.requests), request)
        return JSONResponse(await while_connected(http, request.answer))

    @app.post("/v1/completions", responses=of_openai(CompletionAnswer, has_body=True))
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await answer(CompletionRequest(served, body), http)

    @app.post("/v1/chat/completions", responses=of_openai(ChatAnswer, has_body=True))
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await answer(ChatRequest(served, body), http)

    listed = of_openai(ModelsAnswer, has_body=False, names_model=False)

    @app.get("/v1/models", responses=listed)
    async def models() -> JSONResponse:
        data = [model_record(served, started_at=started_at)]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{model:path}", responses=of_openai(ModelAnswer, has_body=False))
    async def model(model: str) -> JSONResponse:
        require_model(served, model)
        return JSONResponse(model_record(served, started_at=started_at))


def _add_views(app: FastAPI, served: ServedModel, metrics: Metrics) -> None:
    page = _PAGE.read_text(encoding="utf-8")
    engine_loop = served.engine_loop

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    health_states: Responses = {status: {"model": HealthAnswer} for status in (200, 503)}

    @app.get("/health", responses=health_states)
    @app.head("/health", include_in_schema=False)
    async def health() -> JSONResponse:
        state = "failed" if engine_loop.failure else "ok" if engine_loop.is_open else "closing"
        return JSONResponse({"status": state}, status_code=200 if state == "ok" else 503)

    @app.get("/metrics", responses=of_metrics(), response_class=PlainTextResponse)
    async def tell_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _refused(http: Request, status: int, message: str) -> JSONResponse:
    # Not http.url, which is made of the header Host too, whatever the client writes there.
    return refused(http.scope["path"], status, message)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def misspelt(http: Request, error: RequestValidationError) -> JSONResponse:
        return _refused(http, 400, reasons(error.errors()))

    @app.exception_handler(MegatronError)
    async def impossible(http: Request, error: MegatronError) -> JSONResponse:
        return _refused(http, 400, printable("; ".join(str(error).splitlines())))

    @app.exception_handler(UnknownModel)
    async def unknown(http: Request, error: UnknownModel) -> JSONResponse:
        return refused(http.scope["path"], 404, printable(str(error)), code=error.code)

    @app.exception_handler(Unavailable)
    async def unavailable(http: Request, error: Unavailable) -> JSONResponse:
        return _refused(http, 503, str(error))

    @app.exception_handler(ClientGone)
    async def gone(http: Request, error: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(HTTPException)
    async def other(http: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers or {}
        message = str(error.detail)
        if error.status_code == 404:
            message = _NO_PATH
        elif error.status_code == 405:
            message = f"{http.method} is not for this path: write {headers.get('Allow')}"
        elif error.status_code == 400:  # of the framework, which could not parse the body
            message = unreadable_body(error.__cause__)
        refusal = _refused(http, error.status_code, printable(message))
        refusal.headers.update(headers)
        return refusal

    @app.exception_handler(Exception)
    async def unexpected(http: Request, error: Exception) -> JSONResponse:
        return _refused(http, 500, "an error of the server, whose log says more")
