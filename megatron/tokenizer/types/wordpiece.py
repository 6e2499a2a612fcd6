"""WordPiece, from its vocabulary file."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from megatron.common.errors import DataError, WrongDataError, reason
from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.types.options import Takes, TokenizerOptions
from megatron.tokenizer.types.tokenizer import Role, Tokenizer, Vocabulary, no_tokens

_ROLES: dict[str, Role] = {
    "[CLS]": "cls",
    "[SEP]": "sep",
    "[PAD]": "pad",
    "[MASK]": "mask",
    "[UNK]": "unk",
    "[BOS]": "bos",
    "[EOS]": "eos",
}
_MAX_LETTERS = 200  # a longer word is unknown, as in Megatron-LM


class WordPieceTokenizer(Tokenizer):
    """WordPiece tokenizer. A text gets no special tokens; one spelled in a text is plain text.

    `[BOS]`, `[EOS]` and the extra tokens get ids after the file's, unless the file has them.
    Where Unicode changed, and for letters of private use, which are dropped, words are cut as the
    `tokenizers` library does.

    Args:
        vocab_file: one token a line; the first has id 0.
        lower_case: whether letters lose their case and accents.
        extra_ids: how many tokens <extra_id_0>, <extra_id_1> and so on it has to have.

    Raises:
        DataError: the file is missing or damaged.
    """

    hint = "; its --vocab-file names special tokens as [CLS], [SEP], [PAD] and [MASK]"

    def __init__(self, vocab_file: str | Path, *, lower_case: bool, extra_ids: int = 0):
        self.name = str(vocab_file)
        tokens = _read_tokens(Path(vocab_file))
        self._lower_case = lower_case
        vocab = {token: i for i, token in enumerate(tokens)}
        self._backend = Backend(
            models.WordPiece(dict(vocab), unk_token="[UNK]", max_input_chars_per_word=_MAX_LETTERS)
        )
        self._backend.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=None, lowercase=lower_case
        )
        self._backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        extra = [f"<extra_id_{i}>" for i in range(extra_ids)]
        for token in ("[BOS]", "[EOS]", *extra):
            vocab.setdefault(token, len(vocab))
        self._tokens = list(vocab)
        self.vocab_size = len(vocab)
        self.special_ids = {role: vocab[token] for token, role in _ROLES.items() if token in vocab}
        if "sep" in self.special_ids:
            self.special_ids["eod"] = self.special_ids["sep"]
        self.extra_ids = [vocab[token] for token in extra]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no [CLS] before and no [SEP] after it."""
        try:
            return self._backend.encode(self._prepare(text)).ids
        except Exception as error:  # the library defines no exception type
            raise no_tokens(self.name, text, error) from error

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, found on all cores."""
        prepared = [self._prepare(text) for text in texts]
        try:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(prepared)]
        except Exception:  # of the first bad text; encode reports which one and why
            return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the tokens with spaces between words."""
        return " ".join(self._tokens[i] for i in ids).replace(" ##", "")

    def vocabulary(self) -> Vocabulary:
        """Return the tokens, and whether case counts."""
        return Vocabulary(self._tokens, json.dumps({"lower_case": self._lower_case}))

    def _prepare(self, text: str) -> str:
        # The library lowers letter by letter; the small sigma at the end of a word is another one.
        return text.lower() if self._lower_case and "Σ" in text else text


def _read_tokens(path: Path) -> list[str]:
    try:
        tokens = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise WrongDataError(f"cannot read --vocab-file {path}: {reason(error, path)}") from error
    if tokens and not tokens[-1]:
        del tokens[-1]
    if not tokens:
        raise DataError(f"--vocab-file {path} has no token; it must have one in each line")
    lines: dict[str, int] = {}
    for number, token in enumerate(tokens, start=1):
        if (first := lines.setdefault(token, number)) != number:
            raise DataError(
                f"--vocab-file {path}, line {number}: {token!r} stands in line {first} already; "
                "each line must hold another token"
            )
    return tokens


@TOKENIZERS.register(
    "BertWordPieceLowerCase", about=Takes((("vocab_file",),), ("vocab_extra_ids",))
)
def _wordpiece_lower_case(options: TokenizerOptions) -> Tokenizer:
    return WordPieceTokenizer(
        str(options.vocab_file), lower_case=True, extra_ids=options.vocab_extra_ids
    )


@TOKENIZERS.register("BertWordPieceCase", about=Takes((("vocab_file",),), ("vocab_extra_ids",)))
def _wordpiece(options: TokenizerOptions) -> Tokenizer:
    return WordPieceTokenizer(
        str(options.vocab_file), lower_case=False, extra_ids=options.vocab_extra_ids
    )
