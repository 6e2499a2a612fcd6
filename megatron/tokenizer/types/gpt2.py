"""GPT-2's byte-level BPE, from its two files."""

import json
import logging
import re
from collections.abc import Sequence
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megatron.common.errors import DataError, WrongDataError, reason
from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.types.options import Takes, TokenizerOptions
from megatron.tokenizer.types.tokenizer import Tokenizer, Vocabulary, no_tokens, texts_by_id

END_OF_TEXT = "<|endoftext|>"

# Not in the vocabulary on purpose: a byte without a token is then an error, not left out.
_UNKNOWN = "<|byte without a token|>"


# Added to a vocabulary for code to use, such as <pad>, [MASK] or the end of text: without a merge.
_ADDED = re.compile(r"<.*>|\[.*\]")

log = logging.getLogger(__name__)


class GPT2BPETokenizer(Tokenizer):
    """The tokenizer of GPT-2. Every text has ids, and the ids give the same text back.

    As in OpenAI's reference, `<|endoftext|>` written in a text is ordinary text: only code can
    end a document, not data. Letters that Unicode assigned after the `tokenizers` library was
    built count as symbols when words are cut.

    Args:
        vocab_file: JSON object, token to id; the ids are 0 to its length - 1.
        merge_file: one pair of tokens a line, the most frequent first; `#version` is skipped.

    Raises:
        DataError: a file is missing, damaged or cut short, or the two do not belong together.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path):
        vocab = _read_vocab(Path(vocab_file))
        merges = read_merges(Path(merge_file), vocab)
        _look_for_missing_merges(vocab, merges, str(merge_file))
        self._vocab, self._merges = vocab, merges
        self.backend = Backend(models.BPE(vocab, merges, unk_token=_UNKNOWN))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        self.name = str(vocab_file)
        self.vocab_size = len(vocab)
        self.special_ids = {"eod": vocab[END_OF_TEXT]} if END_OF_TEXT in vocab else {}
        self.hint = f"; {END_OF_TEXT} is the token that ends documents"

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        try:
            return self.backend.encode(text).ids
        except Exception as error:  # the library defines no exception type
            reason = f"one of its bytes has no token in {self.name}"
            raise no_tokens(self.name, text, reason) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, found on all cores."""
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts))]
        except Exception:  # of the first bad text; encode reports which one and why
            return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def vocabulary(self) -> Vocabulary:
        """Return the tokens and the merges."""
        return Vocabulary(texts_by_id(self._vocab), json.dumps(self._merges))


def _read_text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongDataError(f"cannot read {flag} {path}: {reason(error, path)}") from error


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        text = _read_text(path, "--vocab-file")
        vocab = json.loads(text)
    except json.JSONDecodeError as error:
        swapped = "; it is a merge file: are --vocab-file and --merge-file swapped?"
        hint = swapped if text.startswith("#version") else ""
        raise DataError(f"--vocab-file {path} is not JSON: {error}{hint}") from error
    ids: list[Any] = list(vocab.values()) if isinstance(vocab, dict) else [None]
    if not all(isinstance(i, int) for i in ids) or sorted(ids) != list(range(len(ids))):
        raise DataError(
            f"--vocab-file {path} is not a JSON object of tokens to the ids 0, 1, 2 and so on, "
            "each once"
        )
    return vocab


def _look_for_missing_merges(
    vocab: dict[str, int], merges: Sequence[tuple[str, str]], merge_file: str
) -> None:
    """Warn of tokens that no merge makes, as where the merge file was cut short.

    Raises:
        DataError: most tokens cannot be made.
    """
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    made = {left + right for left, right in merges}
    missing = [
        token
        for token in vocab.keys() - made
        if len(token) > 1 and letters.issuperset(token) and not _ADDED.fullmatch(token)
    ]
    if not missing:
        return
    message = (
        f"--merge-file {merge_file} makes {len(made)} tokens of the vocabulary, and "
        f"{len(missing)} others, such as {min(missing, key=vocab.__getitem__)!r}, are made by no "
        "merge and so by no text"
    )
    if 2 * len(missing) > len(vocab):
        raise DataError(f"{message}; the file is cut short, or of another tokenizer")
    if parent_process() is None:  # once, and not in each worker
        log.warning("%s; is the file complete?", message)


def read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of a merge file, all of whose tokens must be in `vocab`."""
    merges = []
    for number, line in enumerate(_read_text(path, "--merge-file").split("\n"), start=1):
        if not line or line.startswith("#version"):
            continue
        match line.split(" "):
            case [left, right] if {left, right, left + right} <= vocab.keys():
                merges.append((left, right))
            case [_, _]:
                raise DataError(
                    f"--merge-file {path}, line {number}: {line!r} merges tokens that are not in "
                    "the vocabulary; --vocab-file and --merge-file are of different tokenizers"
                )
            case _:
                raise DataError(
                    f"--merge-file {path}, line {number}: {line[:80]!r} is not two tokens with a "
                    "space between them"
                )
    return merges


@TOKENIZERS.register(
    "GPT2BPETokenizer", about=Takes((("vocab_file",), ("merge_file",)), may_be_fast=True)
)
def _gpt2(options: TokenizerOptions) -> Tokenizer:
    return GPT2BPETokenizer(str(options.vocab_file), str(options.merge_file))
