"""Errors in OpenAI's shape, and the responses of its paths in the OpenAPI document."""

from typing import Any

from pydantic import BaseModel

from megatron.extensions.openai_api.schemas import OpenAIError
from megatron.inference.server.errors import BODY_STATUSES, Responses, error_responses

_CODES = {401: "invalid_api_key"}


def openai_error(message: str, *, status: int, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = code or _CODES.get(status)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def openai_responses(
    answer: type[BaseModel], *, has_body: bool, names_model: bool = True, streams: bool = True
) -> Responses:
    """Return the responses of a path; under /v1, one with a body can be streamed."""
    success: dict[str, Any] = {"model": answer}
    if has_body and streams:
        stream = {"type": "string", "description": "Server-sent events, if stream is true."}
        success["content"] = {"text/event-stream": {"schema": stream}}
    statuses = (401, *((404,) if names_model else ()), *(BODY_STATUSES if has_body else ()))
    return {200: success, **error_responses(statuses, OpenAIError)}
