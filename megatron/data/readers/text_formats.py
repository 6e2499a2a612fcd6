"""Plain text and JSON arrays as JSON lines, in pieces: memory does not grow with a file.

A flag sets the separator of documents in a text; the first character identifies a JSON array, and the
name of a file decides between text and JSON.
"""

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Literal

TextSeparator = Literal["line", "blank-line", "file"]
"""Separator of documents in plain text."""

_JSON, _TEXT = (".jsonl", ".json", ".ndjson"), (".txt", ".text", ".md")
_TABLES = (".parquet", ".arrow")
SUFFIXES = (*_JSON, *_TEXT, *_TABLES)
"""Suffixes of files of documents, in front of the suffix of a compression."""

DATA_SUFFIXES = frozenset({*_JSON, *_TABLES})
"""Those whose files hold records."""

_OUTPUTS = (".report.json", ".tokenizer.json")  # of preprocessing

_COMPRESSED = re.compile(r"\.(gz|zst|xz|lzma|bz2)$")
_JSON_BEGINS = re.compile(rb"\s*(\{|\[\s*[{\]])")
BYTE_ORDER_MARK = codecs.BOM_UTF8
_WHITE_SPACE = b" \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
_TO_ESCAPE = re.compile(rb'["\\\x00-\x1f]')
_LONGEST_BLANK = 1 << 18  # bytes of a blank line; a longer line is not held to look at it


def suffix_of(name: str) -> str:
    """Return the suffix of a file, in front of that of a compression; "" if it has none."""
    name = _COMPRESSED.sub("", name.lower())
    return next(filter(name.endswith, _OUTPUTS), os.path.splitext(name)[1])


def is_text_by_name(name: str, begin: bytes) -> bool:
    """Whether a file is plain text, and not JSON, by its name and its first bytes."""
    is_json = _JSON_BEGINS.match(begin.removeprefix(BYTE_ORDER_MARK)) is not None
    return suffix_of(name) in _TEXT and not is_json


def is_array(begin: bytes) -> bool:
    """Whether a file that begins with these bytes is a JSON array."""
    return begin.removeprefix(BYTE_ORDER_MARK).lstrip(_WHITE_SPACE).startswith(b"[")


def unpacked_array(pieces: Iterator[bytes], line_bytes: int) -> Iterator[bytes]:
    """Yield `pieces` as they are, or each element as a line if they are a JSON array.

    Args:
        line_bytes: the longest element.

    Raises:
        ValueError: the array is not closed, an element is no JSON or too long, or text follows.
    """
    begin: list[bytes] = []
    for piece in pieces:
        begin.append(piece)
        if b"".join(begin).removeprefix(BYTE_ORDER_MARK).strip(_WHITE_SPACE):
            break
    everything = chain(begin, pieces)
    if is_array(b"".join(begin)):
        yield from _elements(everything, line_bytes)
    else:
        yield from everything


def documents_of_text(
    pieces: Iterator[bytes], separator: Literal["blank-line", "file"]
) -> Iterator[bytes]:
    """Yield JSON strings, one a line, in pieces: the documents of a plain text.

    A line end within a document is \\n; white space at both ends of a document is left out.
    """
    is_open = is_in_line = False
    gap = b""  # line ends that count only if more of the document follows
    for line, is_whole in _lines(pieces):
        is_short = is_whole and not is_in_line and len(line) <= _LONGEST_BLANK
        if is_short and not line.strip(_WHITE_SPACE):
            if separator == "blank-line" and is_open:
                yield b'"\n'
                is_open = False
            gap += rb"\n"
            continue
        begin = b"" if is_in_line else gap if is_open else b'"'
        yield begin + _escape(line.removesuffix(b"\r"))
        is_open, is_in_line = True, not is_whole
        gap = rb"\n"
    if is_open:
        yield b'"\n'


def _lines(pieces: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield (line, True), or (a part of a long line, False) before its rest."""
    held = b""
    is_first = True
    for piece in pieces:
        held += piece
        if is_first:
            held, is_first = held.removeprefix(BYTE_ORDER_MARK), len(held) < len(BYTE_ORDER_MARK)
        *lines, held = held.split(b"\n")
        for line in lines:
            yield line, True
        if len(held) > _LONGEST_BLANK:
            yield held, False
            held = b""
    if held:
        yield held, True


def _escape(text: bytes) -> bytes:
    """Return the inside of a JSON string; bytes that are not UTF-8 are left for its reader."""
    return _TO_ESCAPE.sub(lambda found: b"\\u%04x" % ord(found[0]), text)


def _elements(pieces: Iterable[bytes], line_bytes: int) -> Iterator[bytes]:
    """Yield each element of a JSON array as a line."""
    text = _Text(pieces, line_bytes)
    text.take("[")
    number = 0
    while text.next_character() != "]":
        if number:
            text.take(",")
        number += 1
        yield text.value(number).replace("\n", " ").replace("\r", " ").encode() + b"\n"
    text.take("]")
    if text.next_character():
        raise ValueError("text follows the end of the JSON array")


class _Text:
    """The characters of a JSON text that comes in pieces."""

    def __init__(self, pieces: Iterable[bytes], most: int):
        self._pieces = codecs.iterdecode(pieces, "utf-8-sig")
        self._most = most
        self._held = ""
        self._position = 0
        self._decoder = json.JSONDecoder(parse_int=str)  # of any number of digits

    def next_character(self) -> str:
        """Return the next character that is no white space; "" at the end."""
        while True:
            self._position = _SPACES.match(self._held, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._held) or not self._read():
                return self._held[self._position : self._position + 1]

    def take(self, character: str) -> None:
        """Consume `character`, which must be next."""
        if (found := self.next_character()) != character:
            end = repr(found) if found else "its end"
            raise ValueError(f"a JSON array has {end} where {character!r} belongs")
        self._position += 1

    def value(self, number: int) -> str:
        """Return the text of the JSON value that comes next, element `number` of the array."""
        self.next_character()
        while True:
            try:
                _, end = self._decoder.raw_decode(self._held, self._position)
            except (json.JSONDecodeError, RecursionError) as error:
                length = len(self._held) - self._position
                if length <= self._most and self._read(length):
                    continue
                begin = self._held[self._position : self._position + 80]
                raise ValueError(
                    f"element {number} of the JSON array is not JSON, or has more than "
                    f"{self._most} characters: {begin!r}"
                ) from error
            if end < len(self._held) or not self._read():  # a number may have further digits
                start, self._position = self._position, end
                return self._held[start:end]

    def _read(self, count: int = 1) -> bool:
        """Hold at least `count` characters more, where there are; return whether there are any.

        A long element is read twice as far each time, so that its parsing is not quadratic.
        """
        found = [self._held[self._position :]]
        length = 0
        while length < count and (piece := next(self._pieces, "")):
            found.append(piece)
            length += len(piece)
        if length:
            self._held, self._position = "".join(found), 0
        return length > 0
