"""Documents of a block: one for each line or row that is selected, and the errors of invalid lines."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from operator import itemgetter
from typing import Any

import orjson

from megatron.data.readers.inputs import Block, read_range
from megatron.data.readers.tables import columns_of
from megatron.data.readers.text_formats import BYTE_ORDER_MARK

_EXCERPT = 80  # characters of a bad line that a message shows
_PLACE = 20  # and from where it is bad
_MOST_DIGITS = 1000
_MOST_NAMES = 10
_EXPECTED = (
    'each line must be an object such as {"text": "..."}; plain text needs --input-format text, with '
    "--document-separator line, blank-line or file"
)


_LINES = "write each object on one line: jq -c . FILE > LINES"
_STRINGS = "make each string an object: jq -c '.. | strings | {text: .}' FILE > LINES"


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used.

    Args:
        line: its number in the block, from 0.
        problem: the error, and the beginning of the line.
    """

    line: int
    problem: str
    excerpt: str


@dataclass(frozen=True)
class Selection:
    """Selection of documents by their metadata, such as The Pile's meta.pile_set_name.

    Args:
        key: of the metadata; with dots, of an object within objects.
        values: of which a document needs one; numbers, true, false and null as JSON writes them.
    """

    key: str
    values: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a table that can hold the metadata."""
        return tuple(dict.fromkeys((self.key, self.key.partition(".")[0])))

    def selects(self, document: Mapping[str, Any]) -> bool:
        """Whether the document has one of the values, alone or in a list."""
        found: Any = document
        for part in [self.key] if self.key in document else self.key.split("."):
            if isinstance(found, str):  # an object that a table holds as JSON
                found = _parsed_object(found)
            if not isinstance(found, dict) or part not in found:
                return False
            found = found[part]
        every = found if isinstance(found, list) else [found]
        return any(
            (each if isinstance(each, str) else json.dumps(each, default=str)) in self.values
            for each in every
        )


def _parsed_object(text: str) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None


@dataclass
class Documents:
    """The documents of a block.

    Args:
        lines: number in the block of each document's line.
        texts: for each key, the text of each document.
        num_lines: of the block, blank and bad ones included.
        num_unselected: lines that a selection leaves out.
    """

    lines: list[int]
    texts: list[list[str]]
    num_lines: int
    bad: list[BadLine] = field(default_factory=list)
    num_unselected: int = 0

    def remove(self, bad: dict[int, str]) -> None:
        """Take out the documents with these indices, each for the reason given."""
        for i, reason in bad.items():
            self.bad.append(BadLine(self.lines[i], reason, self.texts[0][i][:_EXCERPT]))
        keep = [i for i in range(len(self.lines)) if i not in bad]
        self.lines = [self.lines[i] for i in keep]
        self.texts = [[texts[i] for i in keep] for texts in self.texts]
        self.bad.sort(key=lambda line: line.line)


def read_documents(
    block: Block, keys: Sequence[str], max_line_bytes: int, where: Selection | None = None
) -> Documents:
    """Return the text under each of `keys` of each line that is not blank and is selected."""
    if block.too_long is not None:
        excerpt = block.too_long.decode("utf-8", "replace")
        problem = (
            f"{block.too_long_bytes} bytes long, over the {max_line_bytes} that "
            f"--max-memory-mb leaves for a line: {excerpt!r}"
        )
        return Documents([], [[] for _ in keys], 1, [BadLine(0, problem, excerpt)])
    data = block.data
    if data is None:
        data = read_range(block.path, block.start, block.end)
    if block.rows:
        return _from_rows(data, block.end - block.start, keys, where)
    if block.text:
        return _from_text(data, is_json=block.text != "line", is_begin=not block.start)
    documents = _from_good_lines(data, keys) if where is None else None
    return documents or _from_any_lines(data, keys, where)


def _from_good_lines(data: bytes, keys: Sequence[str]) -> Documents | None:
    """Return the documents if every line is one; twice as fast as looking at each line."""
    # One at a time and not data.split(), so that each line reuses the memory of the last one.
    found = map(itemgetter(*keys), map(orjson.loads, BytesIO(data)))
    try:
        texts = [list(found)] if len(keys) == 1 else [*map(list, zip(*found, strict=True))]
    except (ValueError, KeyError, TypeError):
        return None
    if any(set(map(type, column)) != {str} for column in texts):
        return None
    return Documents(list(range(len(texts[0]))), texts, len(texts[0])) if texts else None


def _from_text(data: bytes, *, is_json: bool, is_begin: bool) -> Documents:
    """Return the documents of plain text: one a line.

    Args:
        is_json: the lines are JSON strings, so that a document may have several lines.
        is_begin: the file begins with these lines.
    """
    documents = Documents([], [[]], 0)
    for number, line in enumerate(BytesIO(data)):
        documents.num_lines = number + 1
        if is_begin and not number:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.isspace() or not line:
            continue
        try:
            text = orjson.loads(line) if is_json else line.rstrip(b"\r\n").decode()
        except ValueError as error:
            location = _location_of(error) if isinstance(error, UnicodeDecodeError) else "not UTF-8"
            problem = f"not a text in UTF-8: {_start(line)!r} ({location})"
            documents.bad.append(BadLine(number, problem, _start(line)))
            continue
        documents.texts[0].append(text)
        documents.lines.append(number)
    return documents


def _from_any_lines(data: bytes, keys: Sequence[str], where: Selection | None = None) -> Documents:
    texts: list[list[str]] = [[] for _ in keys]
    numbers: list[int] = []
    documents = Documents(numbers, texts, 0)
    for number, line in enumerate(BytesIO(data)):
        documents.num_lines = number + 1
        if line.isspace():
            continue
        line = line.removesuffix(b"\n")
        found = _careful(line, keys, where)
        if found is None:
            documents.num_unselected += 1
        elif isinstance(found, str):
            documents.bad.append(BadLine(number, found, _start(line)))
        else:
            for column, text in zip(texts, found, strict=True):
                column.append(text)
            numbers.append(number)
    return documents


def _careful(line: bytes, keys: Sequence[str], where: Selection | None) -> list[str] | str | None:
    """Return the texts of a line, or its error, or None if it is not selected.

    Python's parser decides: it accepts input that the fast one refuses, such as a lone surrogate,
    a number without bounds, or a leading byte order mark.
    """
    try:
        document = orjson.loads(line)
    except ValueError:
        try:
            document = json.loads(line.decode("utf-8-sig"), parse_int=_integer)
        except (ValueError, RecursionError) as error:
            return problem_of(line, error)
    if not isinstance(document, dict):
        expected = _STRINGS if isinstance(document, str) else _EXPECTED
        return f"not a JSON object: {_start(line)!r}; {expected}"
    if where and not where.selects(document):
        return None
    found = []
    for key in keys:
        if key not in document:
            return no_key(key, document)
        if not isinstance(document[key], str):
            return _no_text(key, document[key])
        found.append(document[key])
    return found


def problem_of(line: bytes, error: ValueError | RecursionError) -> str:
    """Return why a line cannot be read. Not all that a parser refuses is no JSON."""
    if isinstance(error, RecursionError) or "depth" in str(error):
        return f"nested too deeply to be read, over about 1000 levels: {_start(line)!r}"
    if "number is infinity" in str(error) or "integer string conversion" in str(error):
        return f"holds a number that is too large to be read: {_start(line)!r}"
    if line.strip() == b"{":
        return f"not JSON: {_start(line)!r} begins an object of several lines; {_LINES}"
    return f"not JSON: {_start(line)!r} ({_location_of(error)}); {_EXPECTED}"


def _start(line: bytes) -> str:
    return line[:_EXCERPT].decode("utf-8", "replace").strip()


def _integer(digits: str) -> int | float:
    """Return a JSON number that no reader uses; Python refuses integers of thousands of digits."""
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


def _location_of(error: ValueError) -> str:
    """Return the JSON error of a line and its column, counted from 1."""
    if isinstance(error, json.JSONDecodeError):
        # Within one line of JSON lines, the parser's line number is always 1.
        rest = error.doc[error.pos : error.pos + _PLACE].rstrip()
        location = f"column {error.pos + 1}, {repr(rest) if rest else 'the end'}"
        return f"{location}: {error.msg.removesuffix(' at').removesuffix(' starting')}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start + 1} is not UTF-8"
    return str(error)


def _from_rows(
    data: bytes, num_rows: int, keys: Sequence[str], where: Selection | None
) -> Documents:
    columns, names = columns_of(data, [*keys, *(where.columns if where else ())])
    documents = Documents([], [[] for _ in keys], num_rows)
    for row in range(num_rows):
        if where and not where.selects({name: column[row] for name, column in columns.items()}):
            documents.num_unselected += 1
            continue
        problem = ""
        for key in keys:
            if key not in columns:
                problem = no_key(key, names)
            elif not isinstance(columns[key][row], str):
                problem = _no_text(key, columns[key][row])
            if problem:
                documents.bad.append(BadLine(row, problem, ""))
                break
        else:
            documents.lines.append(row)
            for texts, key in zip(documents.texts, keys, strict=True):
                texts.append(columns[key][row])
    return documents


def no_key(key: str, names: Collection[str]) -> str:
    """Return that there is no such key, and which there are."""
    hint = "; conversations need --conversations" if "messages" in names else ""
    return f"no key {key!r}; it has {shorten_list(names)} (--json-keys names the keys{hint})"


def shorten_list(names: Collection[str]) -> str:
    """Return the names for a message: the first ones, and how many more there are."""
    first = ", ".join(map(repr, islice(names, _MOST_NAMES))) or "none"
    return f"{first} and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else first


def _no_text(key: str, value: object) -> str:
    return f"key {key!r} holds {json.dumps(value, default=str)[:_EXCERPT]}, which is not a text"
