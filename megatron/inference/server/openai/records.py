"""Records of OpenAI's interfaces that do not depend on a request's kind."""

import json
import secrets
from typing import Any

from megatron.inference.server.served_model import ServedModel

Record = dict[str, Any]

_CODES = {401: "invalid_api_key"}
_OBFUSCATED = 32
"""Characters of text and obfuscation of an event together, if the text is not longer."""


class UnknownModel(Exception):
    """Another model is requested than the one that is served."""

    code = "model_not_found"


def error_record(message: str, *, status: int, code: str | None = None) -> Record:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    found = {"message": message, "type": kind, "param": None, "code": code or _CODES.get(status)}
    return {"error": found}


def require_model(served: ServedModel, name: str) -> None:
    """Raise UnknownModel unless the served model has this name."""
    if name != served.name:
        raise UnknownModel(f"there is no model {name!r} here but {served.name!r}")


def model_record(served: ServedModel, *, started_at: float) -> Record:
    """Return the model as GET /v1/models/{model} does."""
    created = int(started_at)
    return {"id": served.name, "object": "model", "created": created, "owned_by": "megatron"}


def event_line(record: Record, *, obfuscated: int | None = None) -> str:
    """Return a server-sent event.

    Args:
        obfuscated: length of the text, which a field of random characters hides; None: no field.
    """
    if obfuscated is not None:
        padding = secrets.token_hex(_OBFUSCATED)[: max(0, _OBFUSCATED - obfuscated)]
        record = {**record, "obfuscation": padding}
    return f"data: {json.dumps(record)}\n\n"
