"""Cloze accuracy: prediction of the last word of a passage, LAMBADA (arXiv:1606.06031)."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from megatron.common.errors import DataError, reason
from megatron.inference.evaluation.scoring import Window, last_window
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def read_passages(file: Path) -> list[str]:
    """Return the text of each line of a file of JSON objects.

    Raises:
        DataError: the file cannot be read or is empty, or a line has no text.
    """
    try:
        lines = file.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--valid-data {file}: {reason(error, file)}") from error
    texts = [_text(line, f"{file}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise DataError(f"--valid-data {file} is empty")
    return texts


def _text(line: str, source: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{source}: not a JSON object: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f'{source}: needs a "text" with words in it')
    return text


def passage_windows(
    texts: list[str], tokenizer: Tokenizer, *, length: int, strict: bool
) -> Iterator[Window]:
    """Yield the window of each passage that scores its last word.

    Args:
        length: most input tokens; a longer passage is cut at its beginning.
        strict: score all tokens of the last word instead of the text's last token.

    Raises:
        DataError: a last word has more than `length` tokens.
    """
    cut = 0
    for number, text in enumerate(texts, 1):
        context, target = _last_word(text, tokenizer) if strict else _last_token(text, tokenizer)
        if not 0 < len(target) <= length:
            raise DataError(
                f"passage {number}: its last word has {len(target)} tokens, more than --seq-length "
                f"{length}"
            )
        # A prediction needs a context: a passage of a single word follows EOD.
        context = context or [tokenizer.eod]
        cut += len(context) + len(target) > length + 1
        yield last_window(context, target, length=length)
    if cut:
        log.warning(
            "%d of %d passages are longer than --seq-length %d and were cut at their beginning",
            *(cut, len(texts), length),
        )


def _last_word(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    word = text.split()[-1]
    context = text[: text.rfind(word)].strip()
    before = tokenizer.encode(context)
    # The word is encoded with its context: alone, some tokenizers would add BOS to it.
    return before, tokenizer.encode(f"{context} {word}")[len(before) :]


def _last_token(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    tokens = tokenizer.encode(text)
    return tokens[:-1], tokens[-1:]
