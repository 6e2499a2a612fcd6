"""Text repair: each text is kept, repaired or dropped."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.common.errors import needed_for
from megatron.extensions.corpora.cleaning.records import TEXT_KEY, Line, to_bytes

# The languages of most of the web. With the rare ones in the choice, short texts go astray.
_LANGUAGES = (
    "af ar bg bn ca cs cy da de el en es et fa fi fr gu he hi hr hu id it ja kn ko lt lv mk ml mr "
    "ne nl no pa pl pt ro ru sk sl so sq sv sw ta te th tl tr uk ur vi zh"
)


def is_english(text: str) -> bool:
    """Return whether English is the likeliest language of `text`; no letters are no English."""
    language, _ = _identifier().classify(text)
    return language == "en"


@cache
def _identifier() -> Any:
    with needed_for("the language of texts", "py3langid"):
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(_LANGUAGES.split())
    return identifier


MIN_TOKENS = 128
CHARS_PER_TOKEN = 8  # a text of more than so many characters per wanted token needs no counting

_SHORT = 512
_VERY_SHORT = 256
_SPACES = re.compile(r"  +|\b\n+ *")


def fix_text(text: str) -> str:
    """Return `text` with its broken encodings and entities repaired."""
    with needed_for("repair of encodings", "ftfy"):
        import ftfy
    return ftfy.fix_text(text)


def collapse_spaces(text: str) -> str:
    """Return `text` with one space for each run of spaces, and for newlines after a word."""
    return _SPACES.sub(" ", text)


# A task's result for a text; None drops the document.
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
        line: the line to write, without its end; the original line if it was dropped.
        dropped_by: the reason it was dropped; None if it is kept.
        changed_by: the names of the tasks that changed its text.
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
    """Repairs the text, and drops documents that are not English or too short.

    Args:
        make_counter: returns a function that counts the tokens of a text; called once per process.
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


TokenCounter = Callable[[str], int]
"""Returns the number of tokens of a text, or a lower bound of it."""

_PIECE = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def piece_counter() -> TokenCounter:
    """Return a counter of the pieces GPT-2 cuts a text into; each becomes one token or more.

    Source: the pattern of GPT-2's encoder (Radford et al., 2019).
    """
    with needed_for("counting of tokens", "regex"):
        import regex
    piece = regex.compile(_PIECE)
    return lambda text: sum(1 for _ in piece.finditer(text))


@cache
def gpt2_counter(vocab_file: str, merge_file: str) -> TokenCounter:
    """Return a counter of the tokens of a text.

    Raises:
        DataError: a file is missing or damaged.
    """
    from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer

    tokenizer = GPT2BPETokenizer(vocab_file, merge_file)
    return lambda text: len(tokenizer.encode(text))
