"""Differences between the options and inputs of two preprocessing runs, as messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

_NAMED = 3  # files named in a message; the others are counted


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a message for each difference between two results of `preprocess_spec.fingerprint`."""
    ours, theirs = (json.loads(json.dumps(options)) for options in (before, now))
    found: list[str] = []
    for name in {**ours, **theirs}:
        was, wanted = ours.get(name), theirs.get(name)
        if was == wanted:
            continue
        if name == "--input":
            found += _of_inputs(was or [], wanted or [])
        elif name == "the end of a document":
            found.append(
                f"each document ended with {_words(was)} and ends with {_words(wanted)} now "
                "(--append-eod, --append-bos)"
            )
        elif isinstance(was, dict) and isinstance(wanted, dict):
            found += differences(
                {f"{name}'s {part}": value for part, value in was.items()},
                {f"{name}'s {part}": value for part, value in wanted.items()},
            )
        else:
            found.append(f"{name} was {_words(was)} and is {_words(wanted)}")
    return found


def _words(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " and ".join(map(repr, value)) or "nothing"
    return repr(value)


def _of_inputs(was: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield the differences of the files: other names, or other contents.

    Args:
        was: of each file, its path, kind, bytes, and nanoseconds of its last change.
        now: the same.
    """
    paths, paths_now = [entry[0] for entry in was], [entry[0] for entry in now]
    if sorted(paths) != sorted(paths_now):
        gone = _named(path for path in dict.fromkeys(paths) if path not in set(paths_now))
        added = _named(path for path in dict.fromkeys(paths_now) if path not in set(paths))
        yield (
            f"--input named {_files(len(paths))} and names {_files(len(paths_now))}: "
            f"{added or 'none'} new, {gone or 'none'} gone"
        )
    elif paths != paths_now:
        first = next(pair for pair in zip(paths, paths_now, strict=True) if pair[0] != pair[1])
        yield f"--input has another order: {first[1]} comes where {first[0]} was"
    else:
        changed = (pair for pair in zip(was, now, strict=True) if pair[0] != pair[1])
        yield from map(_of_file, *zip(*islice(changed, _NAMED), strict=True))
        if others := sum(1 for _ in changed):
            yield f"{_files(others)} more of --input {'is' if others == 1 else 'are'} not as then"


def _of_file(was: Sequence[Any], now: Sequence[Any]) -> str:
    path, kind, num_bytes, changed_at = was
    _, kind_now, num_bytes_now, changed_at_now = now
    found = []
    if kind != kind_now:
        found.append(f"was {kind} and is {kind_now}")
    if num_bytes != num_bytes_now:
        found.append(f"had {num_bytes} bytes and has {num_bytes_now}")
    if changed_at != changed_at_now:
        found.append(f"was last changed at {_time(changed_at)}, and now at {_time(changed_at_now)}")
    return f"--input {path} {', '.join(found)}"


def _time(nanoseconds: int) -> str:
    at = datetime.fromtimestamp(nanoseconds // 10**9)
    return f"{at:%Y-%m-%d %H:%M:%S}.{nanoseconds % 10**9:09d}"


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _named(paths: Iterator[str]) -> str:
    first = list(islice(paths, _NAMED))
    others = sum(1 for _ in paths)
    return ", ".join([*first, *([f"{others} others"] if others else [])])
