"""HTTP errors: messages and bodies of refused requests, and their statuses in the OpenAPI document."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from megatron.common.extensions import declarations_in
from megatron.inference.server.schemas import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]

_REASONS = {
    400: "The request is invalid; up to 20 errors are listed.",
    401: "The API key is missing or wrong.",
    404: "There is no model with this name.",
    408: "The body did not arrive in time.",
    413: "The body is larger than --max-body-bytes.",
    503: "Too many sequences are waiting, or the server is shutting down.",
}
BODY_STATUSES = (400, 408, 413, 503)
"""Error statuses of a path that reads a body."""

_OBSOLETE = {
    "max_len": "max_len is no longer used: write tokens_to_generate",
    "sentences": "sentences is no longer used: write prompts",
}
_MOST_ERRORS = 20
_LONGEST_VALUE = 60
_LONGEST_MESSAGE = 4000


class UnknownModel(Exception):
    """The requested model is not the served one (status 404)."""

    code = "model_not_found"


def error_response(
    path: str, status: int, message: str, *, code: str | None = None
) -> JSONResponse:
    """Return an error in the shape of the interface that the path belongs to."""
    message = _shorten(message, _LONGEST_MESSAGE)
    body = _body(path, message, status=status, code=code)
    headers = {503: {"Retry-After": "1"}, **dict.fromkeys((408, 413), {"Connection": "close"})}
    return JSONResponse(body, status_code=status, headers=headers.get(status))


def _body(path: str, message: str, *, status: int, code: str | None) -> dict[str, Any]:
    """Return an error as JSON: as an extension forms it for its paths, else the message alone."""
    for forms in declarations_in("interface", "ERROR_BODIES"):
        for prefix, form in forms.items():
            if path.startswith(prefix):
                body: dict[str, Any] = form(message, status=status, code=code)
                return body
    return {"error": message}


def validation_message(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return the first of pydantic's validation errors in one line."""
    found = [*dict.fromkeys(map(_field_message, errors[:_MOST_ERRORS]))]
    if len(errors) > _MOST_ERRORS:
        found.append("there may be further errors")
    return printable("; ".join(found))


def _field_message(error: Mapping[str, Any]) -> str:
    kind, path = error["type"], [str(part) for part in error["loc"] if part != "body"]
    path = [_shorten(part, _LONGEST_VALUE) for part in path]
    name = ".".join(part for part in path if part != "[key]")
    if kind == "json_invalid":
        return f"the body is not JSON: {error.get('ctx', {}).get('error', '')}"
    if not path:
        return "the body must be a JSON object, with the header Content-Type: application/json"
    if kind == "extra_forbidden":
        return _OBSOLETE.get(path[0], f"{name}: there is no such field")
    if kind == "missing":
        return f"{name}: is missing"
    shown = _shorten(repr(error.get("input")), _LONGEST_VALUE)
    return f"{name}: {error['msg'].removeprefix('Value error, ')} (found {shown})"


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "…"


def unreadable_body(cause: BaseException | None) -> str:
    """Return why a body cannot be parsed, from the error that parsing it raised."""
    if isinstance(cause, UnicodeDecodeError):
        byte = cause.object[cause.start]
        return f"the body is not UTF-8: byte {byte:#04x} at position {cause.start}"
    if isinstance(cause, RecursionError):
        return "the body is not JSON that can be read: it is nested too deeply"
    if isinstance(cause, ValueError):
        return "the body is not JSON that can be read: an integer has too many digits"
    return "the body cannot be read"


def printable(text: str) -> str:
    """Escape the characters that UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def megatron_responses(answer: type[BaseModel]) -> Responses:
    """Return the responses of PUT /api for the OpenAPI document."""
    return {200: {"model": answer}, **error_responses((401, *BODY_STATUSES), ErrorAnswer)}


def metrics_responses() -> Responses:
    """Return the responses of GET /metrics."""
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    return {200: text, **error_responses((401,), ErrorAnswer)}


def error_responses(statuses: tuple[int, ...], shape: type[BaseModel]) -> Responses:
    """Return the refusals with these statuses for the OpenAPI document, bodies in one shape."""
    return {one: {"model": shape, "description": _REASONS[one]} for one in sorted(statuses)}


def remove_framework_errors(app: FastAPI) -> None:
    """Remove status 422, which this server never sends, from the OpenAPI document of `app`."""
    original = app.openapi

    def document() -> dict[str, Any]:
        found = original()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found["components"]["schemas"].pop(name, None)
        return found

    app.openapi = document  # type: ignore[method-assign]
