"""Text repair: each text is kept, mended or dropped."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ftfy

from megatron.data.cleaning.language import is_english
from megatron.data.cleaning.records import Line, to_bytes

TEXT_KEY = "text"
MIN_TOKENS = 128
CHARS_PER_TOKEN = 8  # a text of more than so many characters per wanted token needs no counting

_SHORT = 512
_VERY_SHORT = 256
_SPACES = re.compile(r"  +|\b\n+ *")


def fix_text(text: str) -> str:
    """Return `text` with its mangled encodings and entities mended."""
    return ftfy.fix_text(text)


def collapse_spaces(text: str) -> str:
    """Return `text` with one space for each run of spaces, and for newlines after a word."""
    return _SPACES.sub(" ", text)


# What a task makes of a text; None drops the document.
TASKS: dict[str, Callable[[str], str | None]] = {
    "remove_512": lambda text: None if len(text) < _SHORT else text,
    "remove_256_javascript": lambda text: (
        None if len(text) < _VERY_SHORT and "javascript" in text.lower() else text
    ),
    "remove_512_non_english": lambda text: (
        None if len(text) < _SHORT and not is_english(text) else text
    ),
    "ftfy_fix_text": fix_text,
    "general_cleaning": collapse_spaces,
}


@dataclass(frozen=True)
class Outcome:
    """Result of the repair of one line.

    Args:
        line: what to write, without an end of line; the line as it was if it was dropped.
        dropped_by: the reason it was dropped; None if it is kept.
        changed_by: the names of what changed its text.
    """

    line: bytes
    dropped_by: str | None
    changed_by: tuple[str, ...]


@dataclass(frozen=True)
class RunTasks:
    """Runs the tasks, one after the other, until one drops the document."""

    tasks: tuple[str, ...]

    def __call__(self, batch: Sequence[Line]) -> list[Outcome]:
        """Return the outcome of each line."""
        return [self._outcome(line) for line in batch]

    def _outcome(self, line: Line) -> Outcome:
        record = line.record()
        text = line.text(record, TEXT_KEY)
        changed: list[str] = []
        for task in self.tasks:
            done = TASKS[task](text)
            if done is None:
                return Outcome(line.raw, task, tuple(changed))
            if done != text:
                changed.append(task)
            text = done
        if not changed:
            return Outcome(line.raw, None, ())
        return Outcome(to_bytes({**record, TEXT_KEY: text}), None, tuple(changed))


@dataclass(frozen=True)
class CleanDocuments:
    """Mends the text, and drops what is not English or too short.

    Args:
        make_counter: returns what counts the tokens of a text; called once in every process.
    """

    make_counter: Callable[[], Callable[[str], int]]

    def __call__(self, batch: Sequence[Line]) -> list[Outcome]:
        """Return the outcome of each line."""
        count = self.make_counter()
        return [self._outcome(line, count) for line in batch]

    def _outcome(self, line: Line, count: Callable[[str], int]) -> Outcome:
        record = line.record()
        text = line.text(record, TEXT_KEY)
        fixed = fix_text(text)
        changed = ("fixed",) if fixed != text else ()
        if not is_english(fixed):
            return Outcome(line.raw, "not English", changed)
        if len(fixed) < MIN_TOKENS * CHARS_PER_TOKEN and count(fixed) < MIN_TOKENS:
            return Outcome(line.raw, "small", changed)
        kept = to_bytes({**record, TEXT_KEY: fixed}) if changed else line.raw
        return Outcome(kept, None, changed)
