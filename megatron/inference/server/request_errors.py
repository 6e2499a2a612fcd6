"""What is wrong with a request, in one line."""

from collections.abc import Iterable, Mapping
from typing import Any

_OBSOLETE = {
    "max_len": "max_len is no longer used: write tokens_to_generate",
    "sentences": "sentences is no longer used: write prompts",
}
_LONGEST_VALUE = 60


def reasons(errors: Iterable[Mapping[str, Any]]) -> str:
    """Return one line of all that pydantic found wrong."""
    return printable("; ".join(dict.fromkeys(map(_reason, errors))))


def _reason(error: Mapping[str, Any]) -> str:
    kind, place = error["type"], [str(part) for part in error["loc"] if part != "body"]
    name = ".".join(part for part in place if part != "[key]")
    if kind == "json_invalid":
        return f"the body is not JSON: {error.get('ctx', {}).get('error', '')}"
    if not place:
        return "the body must be a JSON object, with the header Content-Type: application/json"
    if kind == "extra_forbidden":
        return _OBSOLETE.get(place[0], f"{name}: there is no such field")
    if kind == "missing":
        return f"{name}: is missing"
    found = repr(error.get("input"))
    shown = found if len(found) <= _LONGEST_VALUE else found[:_LONGEST_VALUE] + "…"
    return f"{name}: {error['msg'].removeprefix('Value error, ')} (found {shown})"


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
    """Return `text` with what UTF-8 cannot write escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
