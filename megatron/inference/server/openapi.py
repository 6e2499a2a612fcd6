"""The OpenAPI document: every status that a path answers with, and the shape of its body."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from megatron.inference.server.openai.response_schemas import MegatronError, OpenAIError

Responses = dict[int | str, dict[str, Any]]

_REASONS = {
    400: "The request is wrong: all that is wrong is listed.",
    401: "The API key is missing or another one.",
    404: "There is no such model.",
    408: "The body did not come in time.",
    413: "The body is larger than --max-body-bytes.",
    503: "Too many sequences are waiting, or the server is shutting down.",
}
_OF_A_BODY = (400, 408, 413, 503)


def of_megatron(answer: type[BaseModel]) -> Responses:
    """Return the responses of PUT /api."""
    return {200: {"model": answer}, **_refusals((401, *_OF_A_BODY), MegatronError)}


def of_openai(answer: type[BaseModel], *, has_body: bool, names_model: bool = True) -> Responses:
    """Return the responses of a path under /v1; one with a body can be streamed."""
    success: dict[str, Any] = {"model": answer}
    if has_body:
        stream = {"type": "string", "description": "Server-sent events, if stream is true."}
        success["content"] = {"text/event-stream": {"schema": stream}}
    statuses = (401, *((404,) if names_model else ()), *(_OF_A_BODY if has_body else ()))
    return {200: success, **_refusals(statuses, OpenAIError)}


def of_metrics() -> Responses:
    """Return the responses of GET /metrics."""
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    return {200: text, **_refusals((401,), MegatronError)}


def _refusals(statuses: tuple[int, ...], shape: type[BaseModel]) -> Responses:
    return {one: {"model": shape, "description": _REASONS[one]} for one in sorted(statuses)}


def describe(app: FastAPI) -> None:
    """Let the OpenAPI document of `app` leave out what the framework adds and never happens."""
    of_framework = app.openapi

    def document() -> dict[str, Any]:
        found = of_framework()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        return found

    app.openapi = document  # type: ignore[method-assign]
