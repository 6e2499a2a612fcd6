"""The grammar of `--train-weighted-split-paths` and its siblings: `NAME: W START:END PATH, …`."""

import re
from dataclasses import dataclass
from pathlib import Path

from megatron.common.errors import ConfigError, reason


@dataclass(frozen=True)
class SplitPart:
    """A part of one corpus, and its weight in a blend."""

    weight: float
    start: float  # fractions of the documents, in file order
    end: float
    prefix: str


@dataclass(frozen=True)
class SplitGroup:
    """Parts of corpora that are read as one data set, under a name."""

    name: str
    parts: tuple[SplitPart, ...]


def parse_split_group(text: str, flag: str) -> SplitGroup:
    """Return the group that `text` describes.

    Args:
        flag: where the text comes from, for messages.

    Raises:
        ConfigError: lists everything that is not of the grammar.

    >>> parse_split_group("valid: 0.3 0.95:1 en, 0.7 0:1 fr", "--valid-weighted-split-paths").name
    'valid'
    """
    name, colon, entries = text.partition(":")
    name = name.strip()
    if not colon or not name or len(name.split()) > 1 or "/" in name:
        raise ConfigError(
            f"{flag}: {text!r} does not start with one word and a colon; write "
            "'NAME: WEIGHT START:END PATH, WEIGHT START:END PATH'"
        )
    parts, problems = [], []
    # Lists built by scripts may end in a comma, or have two in a row.
    for entry in filter(str.strip, entries.split(",")):
        try:
            parts.append(_parse_part(entry))
        except ValueError as error:
            problems.append(f"{flag}: {entry.strip()!r} in {name}: {error}")
    if not problems and not sum(part.weight for part in parts) > 0:
        problems.append(f"{flag}: the weights in {name} are all 0")
    if problems:
        raise ConfigError(*problems)
    return SplitGroup(name, tuple(parts))


def _parse_part(entry: str) -> SplitPart:
    words = entry.split()
    if len(words) != 3:
        raise ValueError("expected three words: WEIGHT START:END PATH")
    weight, bounds, prefix = words
    start, colon, end = bounds.partition(":")
    try:
        part = SplitPart(float(weight), float(start), float(end), prefix)
    except ValueError:
        raise ValueError("WEIGHT, START and END must be numbers") from None
    if not 0 <= part.weight < float("inf"):
        raise ValueError("WEIGHT must be 0 or more")
    if not 0 <= part.start < part.end <= 1:
        raise ValueError("START:END must be fractions with 0 <= START < END <= 1")
    return part


def read_split_groups(file: str, flag: str) -> list[str]:
    """Return the group texts in `file`: each in double quotes, with white space between them.

    Raises:
        ConfigError: the file cannot be read or holds something else.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {file}: {reason(error, file)}") from error
    groups = re.findall(r'"([^"]*)"', text)
    if not groups or re.sub(r'"[^"]*"', "", text).strip():
        raise ConfigError(
            f'{flag} {file}: expected groups in double quotes, such as "NAME: 1 0:0.95 PATH"'
        )
    return groups
