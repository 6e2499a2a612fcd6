"""Column files of token classification (IOB, CoNLL, CoNLL-U): a word on each line, with its label."""

import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.common.errors import WrongDataError
from megatron.extensions.tasks.data.task import EXCERPT, read_lines, wrong_line
from megatron.extensions.tasks.data.text_flags import TextTaskPlan

log = logging.getLogger(__name__)

LABEL_NAMES = frozenset(
    (
        *("label", "labels", "class", "category", "target", "sentiment", "intent", "emotion"),
        *("tag", "tags", "ner", "ner_tag", "ner_tags"),
    )
)
"""Names of a column of labels in a header."""

TEXT_NAMES = frozenset(
    (
        *("text", "sentence", "review", "tweet", "comment", "utterance", "content"),
        *("word", "words", "token", "tokens"),
    )
)
"""Names of a column of sentences or words in a header."""

_TAG = re.compile(r"O|[BIESLUMW]-.+")
_NUMBER = re.compile(r"\d+")
_RANGE = re.compile(r"\d+[-.]\d+")
_SPACES = re.compile("[ \t]+")
_DOCUMENT_START = "-DOCSTART-"


@dataclass(frozen=True)
class Layout:
    """Layout of a file of columns, as far as flags decide it; None: by the look of the file.

    Args:
        text, label: columns of words or sentences and of labels, from 1.
        separator: "tab" or "space" (any number of spaces and tabs).
        has_header: whether line 1 names the columns.
    """

    text: int | None = None
    label: int | None = None
    separator: str | None = None
    has_header: bool | None = None

    @classmethod
    def of(cls, plan: TextTaskPlan) -> "Layout":
        """Return the layout that the flags of a task give."""
        return cls(
            plan.text_column or None,
            plan.label_column or None,
            plan.column_separator or None,
            {"yes": True, "no": False}.get(plan.header),
        )


BY_LOOK = Layout()
"""Layout of a file about which flags decide nothing."""


class ColumnLine(NamedTuple):
    """A line of a file: its number and its columns."""

    number: int
    fields: list[str]


def read_column_sentences(
    path: Path, layout: Layout, *, labelled: bool
) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Yield the line of the first word, and each word and label, of the sentences of a file.

    Empty lines end sentences. Lines that begin with "# " before a sentence are comments, unless
    they have the columns and a label of the other lines.

    Args:
        labelled: whether labels are needed. Of a file without, they are "".

    Raises:
        WrongDataError: a line lacks a column, or the roles of the columns are ambiguous; the
            message names the line and the flag.
    """
    blocks = [*_blocks(path)]
    separator = layout.separator or _separator(path, blocks)
    sentences = [[_split_line(line, separator) for line in block] for block in blocks]
    sentences = _without_comments(path, sentences)
    if sentences and _has_header(sentences[0][0], layout):
        log.info("%s, line %d is taken for a header", path, sentences[0][0].number)
        sentences[0] = sentences[0][1:]
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        return
    is_numbered = all(map(_counts_words, sentences))
    if is_numbered:  # lines 1-2 and 1.1 of CoNLL-U are not separate words
        sentences = [[li for li in s if _NUMBER.fullmatch(li.fields[0])] for s in sentences]
    _require_clear(path, sentences, layout, is_numbered=is_numbered, labelled=labelled)
    text, label = _columns(path, sentences[0][0], layout, labelled=labelled)
    if spaced := sum(" " in line.fields[text] for s in sentences for line in s):
        log.info("%s: %d words have spaces: columns are separated by tabs", path, spaced)
    for sentence in sentences:
        yield (
            sentence[0].number,
            [
                (line.fields[text], line.fields[label] if label < len(line.fields) else "")
                for line in sentence
            ],
        )


def _columns(path: Path, line: ColumnLine, layout: Layout, *, labelled: bool) -> tuple[int, int]:
    """Return the columns of words and labels, from 0; of words alone one that no line has.

    Raises:
        WrongDataError: labels are needed, and the last column holds the words.
    """
    text, last = layout.text or 1, len(line.fields)
    label = layout.label or last
    if label != text:
        return text - 1, label - 1
    if labelled:
        raise wrong_line(path, line.number, f"column {text} has the words: give --label-column")
    return text - 1, last


def _blocks(path: Path) -> Iterator[list[tuple[int, str]]]:
    """Yield the lines of each sentence; lines that begin documents are left out."""
    block: list[tuple[int, str]] = []
    previous = 0
    for number, text in read_lines(path):
        is_word = bool(text.strip(" \t")) and not text.startswith(_DOCUMENT_START)
        # Blank lines are not read: their numbers are missing.
        if block and (number != previous + 1 or not is_word):
            yield block
            block = []
        previous = number
        if is_word:
            block.append((number, text))
    if block:
        yield block


def _separator(path: Path, blocks: Sequence[Sequence[tuple[int, str]]]) -> str:
    """Return the separator of a file: a tab, if all lines of several columns have one.

    Raises:
        WrongDataError: some lines have tabs, and some spaces only.
    """
    lines = [line for block in blocks for line in block if not line[1].startswith("#")]
    wide = [(number, text) for number, text in lines if _SPACES.search(text.strip(" \t"))]
    without = [(number, text) for number, text in wide if "\t" not in text.strip(" \t")]
    if not without:
        return "tab" if wide else "space"
    if len(without) < len(wide):
        number, text = without[0]
        raise wrong_line(
            path,
            number,
            f"{text[:EXCERPT]!r} has spaces and no tab, and {len(wide) - len(without)} other lines have "
            "tabs: write --column-separator tab or --column-separator space",
        )
    return "space"


def _split_line(line: tuple[int, str], separator: str) -> ColumnLine:
    number, text = line
    if separator == "tab":
        return ColumnLine(number, [field.strip(" ") for field in text.rstrip(" \t").split("\t")])
    return ColumnLine(number, _SPACES.split(text.strip(" \t")))


def _without_comments(path: Path, sentences: list[list[ColumnLine]]) -> list[list[ColumnLine]]:
    """Return the sentences without the comments before them."""
    words = [line.fields for s in sentences for line in s if not line.fields[0].startswith("#")]
    widths, labels = {*map(len, words)}, {fields[-1] for fields in words}
    count = 0
    found = []
    for sentence in sentences:
        first = 0
        while first < len(sentence) and _is_comment(sentence[first].fields, widths, labels):
            first += 1
        count += first
        found.append(sentence[first:])
    if count:
        log.info("%s: %d lines that begin with # are comments", path, count)
    return [sentence for sentence in found if sentence]


def _is_comment(fields: list[str], widths: set[int], labels: set[str]) -> bool:
    if not fields[0].startswith("#") or fields[0].split(" ")[0].strip("#") or not widths:
        return False
    is_like_others = len(fields) in widths and " " not in fields[0]
    return not (is_like_others and (fields[-1] in labels or _TAG.fullmatch(fields[-1])))


def _has_header(line: ColumnLine, layout: Layout) -> bool:
    """Whether a first line holds names of columns."""
    if layout.has_header is not None:
        return layout.has_header
    names = {field.lower() for field in line.fields}
    return bool(names & TEXT_NAMES) and bool(names & LABEL_NAMES)


def _counts_words(sentence: Sequence[ColumnLine]) -> bool:
    """Whether the first of several columns numbers the words."""
    firsts = [line.fields[0] for line in sentence if not _RANGE.fullmatch(line.fields[0])]
    return len(sentence[0].fields) > 1 and any(
        firsts == [str(number) for number in range(begin, begin + len(firsts))] for begin in (0, 1)
    )


def _require_clear(
    path: Path,
    sentences: Sequence[Sequence[ColumnLine]],
    layout: Layout,
    *,
    is_numbered: bool,
    labelled: bool,
) -> None:
    """Refuse a file whose columns of words and labels are in doubt.

    Raises:
        WrongDataError: as `read_column_sentences`.
    """
    lines = [line for sentence in sentences for line in sentence]
    remedy = "--text-column and --label-column name the columns of words and labels, from 1"
    _require_columns(path, lines, layout, remedy, labelled=labelled)
    if (layout.text and layout.label) or len(lines[0].fields) < 2:
        return
    where = f"{path}, line {lines[0].number}"
    if is_numbered:
        raise WrongDataError(
            f"{where}: the first column numbers the words, as in CoNLL-U and GermEval: {remedy}"
        )
    firsts, lasts = ({line.fields[i] for line in lines} for i in (0, -1))
    if not layout.text and all(map(_TAG.fullmatch, firsts)) and not all(map(_TAG.fullmatch, lasts)):
        raise WrongDataError(
            f"{where}: the first column has tags such as {min(firsts)}, and the last has not: {remedy}"
        )
    if not layout.label and lasts == {"_"}:
        raise WrongDataError(f"{where}: the last column is _ in each line: {remedy}")


def _require_columns(
    path: Path, lines: Sequence[ColumnLine], layout: Layout, remedy: str, *, labelled: bool
) -> None:
    """Refuse lines with another number of columns than the rest, or with an empty column."""
    ((most, _),) = Counter(len(line.fields) for line in lines).most_common(1)
    for number, fields in lines:
        text = "\t".join(fields)[:EXCERPT]
        if labelled and len(fields) < max(2, layout.label or 0):
            raise wrong_line(path, number, f"{text!r} has no label: WORD LABEL is expected")
        if len(fields) < (layout.text or 1):
            raise wrong_line(
                path, number, f"{text!r} has {len(fields)} columns; --text-column is {layout.text}"
            )
        is_decided = layout.text and layout.label and len(fields) >= layout.label
        if len(fields) != most and not is_decided:
            raise wrong_line(
                path,
                number,
                f"{text!r} has {len(fields)} columns, and other lines have {most}: columns are "
                f"separated by spaces, or all by tabs (--column-separator); {remedy}",
            )
        ends = (layout.text or 1, layout.label or len(fields))
        if not all(fields[column - 1] for column in ends if column <= len(fields)):
            raise wrong_line(path, number, f"{text!r}: the word or its label is empty")
