"""Tokenizers from a SentencePiece model file, with Megatron-LM's legacy special tokens or without.

Megatron-LM adds special tokens to the model's only with `--tokenizer-sentencepiece-legacy`.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.common.errors import WrongDataError, needed_for
from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.types.options import Takes, TokenizerOptions
from megatron.tokenizer.types.tokenizer import Role, Tokenizer, Vocabulary, no_tokens

# Megatron-LM appends these tokens to the model's, in this order.
_ADDED: tuple[tuple[str, Role], ...] = (
    ("<CLS>", "cls"),
    ("<SEP>", "sep"),
    ("<EOD>", "eod"),
    ("<MASK>", "mask"),
)
_OF_THE_MODEL: tuple[tuple[str, Role], ...] = (("<PAD>", "pad"), ("<BOS>", "bos"), ("<EOS>", "eos"))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model as it is: eos ends a document, and no text begins with bos.

    A special token spelled in a text is plain text.

    Args:
        model_file: a SentencePiece model of any kind.

    Raises:
        ConfigError: the sentencepiece library is not installed.
        DataError: the file is missing or damaged.
    """

    def __init__(self, model_file: str | Path):
        self.name = str(model_file)
        self._model = _load(Path(model_file))
        self._tokens = [self._model.id_to_piece(i) for i in range(len(self._model))]
        self.vocab_size = len(self._tokens)
        model = self._model
        ids: dict[Role, int] = {
            "pad": model.pad_id(),
            "bos": model.bos_id(),
            "eos": model.eos_id(),
            "unk": model.unk_id(),
        }
        self.special_ids = {role: i for role, i in ids.items() if i >= 0}
        if "eos" in self.special_ids:
            self.special_ids["eod"] = self.special_ids["eos"]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return self._pieces(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self._model.decode([int(i) for i in ids])

    def vocabulary(self) -> Vocabulary:
        """Return the pieces and their scores."""
        scores = [self._model.get_score(i) for i in range(len(self._model))]
        return Vocabulary(self._tokens, json.dumps(scores))

    def _pieces(self, text: str) -> list[int]:
        try:
            return self._model.encode(text)
        except Exception as error:  # the library defines no exception type
            raise no_tokens(self.name, text, error) from error


class LegacySentencePieceTokenizer(SentencePieceTokenizer):
    """A SentencePiece model with the special tokens that Megatron-LM added to it until 2025.

    A special token spelled in a text is that token, as in Megatron-LM; the text between two
    special tokens is encoded separately.

    Args:
        model_file: a SentencePiece model of any kind.
        extra_ids: how many tokens <extra_id_0>, <extra_id_1> and so on it has to have.
    """

    def __init__(self, model_file: str | Path, *, extra_ids: int = 0):
        super().__init__(model_file)
        ids = {token: i for i, token in enumerate(self._tokens)}
        extra = [f"<extra_id_{i}>" for i in range(extra_ids)]
        named: dict[str, Role] = dict(_ADDED)
        for fallback, role in _OF_THE_MODEL:
            given = self.special_ids.get(role)
            named[fallback if given is None else self._tokens[given]] = role
        special = [*named, *extra]
        for token in special:
            ids.setdefault(token, len(ids))
        self._tokens = list(ids)
        self.vocab_size = len(ids)
        self.special_ids = {
            **{role: i for role, i in self.special_ids.items() if role == "unk"},
            **{role: ids[token] for token, role in named.items()},
        }
        self.extra_ids = [ids[token] for token in extra]
        self._special = {token: ids[token] for token in special}
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")").split

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ids: list[int] = []
        for index, part in enumerate(self._split(text)):
            ids += [self._special[part]] if index % 2 else self._pieces(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with a space on both sides of a special token."""
        special = set(self._special.values())
        parts: list[str] = []
        run: list[int] = []
        for i in ids:
            if i in special:
                parts += [self._model.decode(run), f" {self._tokens[i]} "]
                run = []
            else:
                run.append(int(i))
        return "".join([*parts, self._model.decode(run)])


class LegacyLlama2Tokenizer(SentencePieceTokenizer):
    """Megatron-LM's tokenizer of Llama 2 until 2025: each text begins with bos."""

    def encode(self, text: str) -> list[int]:
        """Return bos and the ids of `text`."""
        return [self.special("bos"), *self._pieces(text)]


def _load(path: Path) -> Any:
    with needed_for("a tokenizer of SentencePiece", "sentencepiece"):
        from sentencepiece import SentencePieceProcessor
    try:
        return SentencePieceProcessor(model_proto=path.read_bytes())
    except (OSError, RuntimeError) as error:
        reason = str(error) if isinstance(error, OSError) else "not a SentencePiece model"
        raise WrongDataError(f"cannot read --tokenizer-model {path}: {reason}") from error


@TOKENIZERS.register(
    "SentencePieceTokenizer",
    about=Takes((("tokenizer_model",),), ("vocab_extra_ids", "tokenizer_sentencepiece_legacy")),
)
def _sentencepiece(options: TokenizerOptions) -> Tokenizer:
    model = str(options.tokenizer_model)
    if options.tokenizer_sentencepiece_legacy:
        return LegacySentencePieceTokenizer(model, extra_ids=options.vocab_extra_ids)
    return SentencePieceTokenizer(model)


_LEGACY_OR_NOT = Takes((("tokenizer_model",),), ("tokenizer_sentencepiece_legacy",))


@TOKENIZERS.register("GPTSentencePieceTokenizer", about=_LEGACY_OR_NOT)
def _gpt_sentencepiece(options: TokenizerOptions) -> Tokenizer:
    return SentencePieceTokenizer(str(options.tokenizer_model))


@TOKENIZERS.register("Llama2Tokenizer", about=_LEGACY_OR_NOT)
def _llama(options: TokenizerOptions) -> Tokenizer:
    model = str(options.tokenizer_model)
    if options.tokenizer_sentencepiece_legacy:
        return LegacyLlama2Tokenizer(model)
    return SentencePieceTokenizer(model)
