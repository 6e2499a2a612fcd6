"""Objects as JSON text for messages between processes: decoding runs no code of the message.

A pickle can run any program in the process that loads it. Here a message can contain plain values,
tuples, sets, bytes, paths, members of enumerations, dataclasses and this package's errors. Instances
are filled field by field: no constructor is called, and no module of another package is imported.
"""

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.common.errors import MegatronError

_PLAIN = frozenset({type(None), bool, int, float, str})
_DAMAGE = (ValueError, TypeError, KeyError, AttributeError, ImportError, RecursionError)


class MessageError(MegatronError):
    """A message does not decode: another program has written it, or another version of this one."""


class UnsendableError(MegatronError):
    """A value contains an object of a kind that messages cannot contain."""


def encode(value: Any) -> bytes:
    """Return `value` as JSON, with a tag around what JSON lacks.

    Raises:
        TypeError: `value` contains an object of a kind that cannot be sent.
    """
    return json.dumps(_tag(value), separators=(",", ":")).encode()


def encode_or_refuse(value: Any) -> tuple[bytes, UnsendableError | None]:
    """Return a message for processes that wait for one, and None or what is wrong with `value`.

    The message then contains the error, which `decode` raises.
    """
    try:
        return encode(value), None
    except _DAMAGE as error:
        content = json.dumps({"unsendable": str(error)}).encode()
        return content, UnsendableError(str(error))


def decode(content: bytes) -> Any:
    """Return the value that `encode` was given.

    Raises:
        MessageError: `content` is no such text.
        UnsendableError: the sender could not encode its value.
    """
    try:
        return json.loads(content, object_hook=_untag)
    except _DAMAGE as error:
        start = content[:40]
        raise MessageError(
            f"a message of {len(content)} bytes between processes of this run does not decode "
            f"({type(error).__name__}; it starts with {start!r}): another program writes to "
            "MASTER_ADDR:MASTER_PORT, or the processes run different versions; start them with "
            "another MASTER_PORT and the same version"
        ) from error


def _tag(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return value if _PLAIN.issuperset(map(type, value)) else [*map(_tag, value)]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: _tag([*value])}
    if isinstance(value, dict):
        return {"dict": _tag([item for pair in value.items() for item in pair])}
    if kind is bytes:
        return {"bytes": b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Enum):
        return {"member": [*_name_of(kind), value.name]}
    if is_dataclass(value) and not isinstance(value, type):
        values = [_tag(getattr(value, each.name)) for each in fields(value)]
        return {"record": [*_name_of(kind), *values]}
    if isinstance(value, MegatronError):
        return {"error": [*_name_of(kind), _tag(value.args), _tag(vars(value))]}
    if isinstance(value, float):  # of numpy
        return float(value)
    raise TypeError(f"a message between processes cannot contain a {kind.__qualname__}")


def _name_of(kind: type) -> list[str]:
    """Return module and name of a class, by which other processes find it.

    Raises:
        TypeError: the class is not an attribute of its module.
    """
    if _class(kind.__module__, kind.__qualname__) is not kind:
        raise TypeError(f"a message between processes cannot contain a {kind.__qualname__}")
    return [kind.__module__, kind.__qualname__]


def _class(module: str, name: str) -> Any:
    """Return a class by name; of another package only if its module is imported already."""
    if module.partition(".")[0] == __name__.partition(".")[0]:
        import_module(module)
    # Not getattr, which can run code of the module.
    return vars(sys.modules[module]).get(name)


def _untag(tagged: dict[str, Any]) -> Any:
    ((tag, content),) = tagged.items()
    return _BY_TAG[tag](content)


def _dict(flat: list[Any]) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _member(content: list[Any]) -> Enum:
    module, name, member = content
    kind = _class(module, name)
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise TypeError(f"{name} is no enumeration")
    return kind.__members__[member]


def _record(content: list[Any]) -> Any:
    module, name, *values = content
    kind = _class(module, name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"{name} is no dataclass")
    record = object.__new__(kind)
    for field, value in zip(fields(kind), values, strict=True):
        object.__setattr__(record, field.name, value)
    return record


def _error(content: list[Any]) -> MegatronError:
    module, name, words, attributes = content
    kind = _class(module, name)
    if not (isinstance(kind, type) and issubclass(kind, MegatronError)):
        raise TypeError(f"{name} is no error of this package")
    error = kind.__new__(kind, *words)
    vars(error).update(attributes)
    return error


def _unsendable(message: str) -> None:
    raise UnsendableError(message)


_BY_TAG: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": _dict,
    "bytes": partial(b64decode, validate=True),
    "path": Path,
    "member": _member,
    "record": _record,
    "error": _error,
    "unsendable": _unsendable,
}
