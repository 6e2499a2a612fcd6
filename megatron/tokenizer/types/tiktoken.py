"""Byte-level BPE by the tiktoken library, from a file of ranks. Nothing is downloaded."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, DataError, WrongDataError, needed_for, raise_if_any
from megatron.common.registry import TOKENIZERS
from megatron.tokenizer.types.options import Pattern, Takes, TokenizerOptions
from megatron.tokenizer.types.tokenizer import (
    Role,
    Tokenizer,
    Vocabulary,
    has_half_a_surrogate_pair,
    no_tokens,
    texts_by_id,
)

_CONTRACTIONS = r"'(?i:[sdmt]|ll|ve|re)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# v1 and v2 are Megatron-LM's names, the other names OpenAI's.
PATTERNS: dict[Pattern, str] = {
    "v1": (r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"),
    "v2": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "r50k": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|\p{{N}}{{1,3}}+"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_PUBLISHED: dict[str, tuple[Pattern, dict[str, int]]] = {
    "r50k_base": ("r50k", {"<|endoftext|>": 50256}),
    "cl100k_base": ("cl100k", {"<|endoftext|>": 100257, **_FIM, "<|endofprompt|>": 100276}),
    "o200k_base": ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
_ROLES: dict[Role, tuple[str, ...]] = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>"),
    "unk": ("<unk>",),
    "pad": ("<pad>", "<|pad|>"),
    "cls": ("<cls>", "<|cls|>"),
    "sep": ("<sep>", "<|sep|>"),
    "mask": ("<mask>", "<|mask|>"),
}
_REQUIRED = ["<unk>", "<s>", "</s>"]  # of Megatron-LM's files
_DEFAULT_VOCAB_SIZE = 2**17
_DEFAULT_SPECIAL_IDS = 1000


class TikTokenizer(Tokenizer):
    """A tokenizer of the tiktoken library. A special token spelled in a text is plain text.

    A file `.json` is Megatron-LM's: a list of `{"rank", "token_bytes", "token_str"}`. Its special
    tokens come first, and only as many ranks follow as `vocab_size` has room for. In any other
    file each line is a token in base64 and its id; a file named like one of OpenAI's encodings
    needs no further options.

    Args:
        model_file: the ranks.
        pattern: a name in PATTERNS.
        vocab_size: number of ids in all; of a .json file only.
        num_special_tokens: ids before the first rank; of a .json file only.
        special_tokens: the special tokens in the order of their ids.

    Raises:
        ConfigError: the tiktoken library is not installed, or the numbers contradict each other.
        DataError: the file is missing or damaged.
    """

    hint = "; --tiktoken-special-tokens names more, such as </s> for eos and eod"

    def __init__(
        self,
        model_file: str | Path,
        *,
        pattern: Pattern | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int | None = None,
        special_tokens: Sequence[str] | None = None,
    ):
        self.name = str(model_file)
        path = Path(model_file)
        if path.suffix == ".json":
            ranks, special = _megatron_ids(
                path,
                _REQUIRED if special_tokens is None else special_tokens,
                _DEFAULT_SPECIAL_IDS if num_special_tokens is None else num_special_tokens,
                _DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size,
            )
        elif vocab_size is None and num_special_tokens is None:
            ranks, special = _published_ids(path, special_tokens or ())
            pattern = pattern or (_PUBLISHED[path.stem][0] if path.stem in _PUBLISHED else None)
        else:
            raise ConfigError(
                "--vocab-size and --tiktoken-num-special-tokens are for the .json files of "
                f"TikTokenizer; {path.name} sets its size itself"
            )
        if pattern is None:
            raise ConfigError(
                f"--tiktoken-pattern is missing, and {path.name} is not the name of one of "
                f"OpenAI's encodings: give one of {', '.join(PATTERNS)}"
            )
        self._pattern = PATTERNS[pattern]
        self._tokens = texts_by_id(
            {token.decode("utf-8", "backslashreplace"): i for token, i in ranks.items()} | special
        )
        self._encoding = _encoding(self.name, self._pattern, ranks, special)
        self.vocab_size = len(self._tokens)
        self.special_ids = {
            role: special[token]
            for role, tokens in _ROLES.items()
            for token in reversed(tokens)
            if token in special
        }
        if "eos" in self.special_ids:
            self.special_ids["eod"] = self.special_ids["eos"]

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        if has_half_a_surrogate_pair(text):
            raise no_tokens(self.name, text, "")
        try:
            return self._encoding.encode_ordinary(text)
        except Exception as error:  # the library defines no exception type
            raise no_tokens(self.name, text, error) from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        return self._encoding.decode([int(i) for i in ids])

    def vocabulary(self) -> Vocabulary:
        """Return the tokens, in merge order, and the pattern that cuts words."""
        return Vocabulary(self._tokens, self._pattern)


def _megatron_ids(
    path: Path, special: Sequence[str], num_special: int, vocab_size: int
) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return the ids of ranks and of special tokens in Megatron-LM's layout."""
    problems = []
    if len(set(special)) < len(special):
        problems.append(f"--tiktoken-special-tokens {' '.join(special)}: name each once")
    if missing := [token for token in _REQUIRED if token not in special]:
        problems.append(f"--tiktoken-special-tokens lacks {' '.join(missing)}")
    if not len(special) <= num_special < vocab_size:
        problems.append(
            f"--tiktoken-num-special-tokens {num_special} must be at least {len(special)}, the "
            f"number of special tokens, and less than --vocab-size {vocab_size}"
        )
    raise_if_any(problems)
    fillers = [f"<SPECIAL_{i}>" for i in range(len(special), num_special)]
    ids = {token: i for i, token in enumerate([*special, *fillers])}
    tokens = _read_json_tokens(path)
    if len(tokens) < vocab_size - num_special:
        raise DataError(
            f"{path} has {len(tokens)} tokens, too few for --vocab-size {vocab_size} with "
            f"{num_special} special ones; give at most {len(tokens) + num_special}"
        )
    ordinary = tokens[: vocab_size - num_special]
    return {token: num_special + i for i, token in enumerate(ordinary)}, ids


def _published_ids(path: Path, special: Sequence[str]) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return the token ids of a file of lines, and its special tokens' ids."""
    ranks = _read_lines(path)
    ids = dict(_PUBLISHED[path.stem][1]) if path.stem in _PUBLISHED else {}
    start = max([*ranks.values(), *ids.values()]) + 1
    added = [token for token in dict.fromkeys(special) if token not in ids]
    return ranks, ids | {token: start + i for i, token in enumerate(added)}


def _read_json_tokens(path: Path) -> list[bytes]:
    try:
        entries = json.loads(_read(path))
        tokens = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        is_right = [entry["rank"] for entry in entries] == list(range(len(entries)))
    except (ValueError, TypeError, KeyError):
        tokens, is_right = [], False
    if not is_right or len(set(tokens)) < len(tokens) or not tokens:
        raise DataError(
            f"{path} is not a JSON list of objects with rank (0, 1, 2 and so on), token_bytes "
            "(base64, each once) and token_str"
        )
    return tokens


def _read_lines(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number}: {line[:80]!r} is not a token in base64 and its id"
            ) from error
    if not ranks or len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
        raise DataError(f"{path} does not hold one token and one id a line, each once")
    return ranks


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise WrongDataError(
            f"cannot read the file of TikTokenizer {path}: {error.strerror}"
        ) from error


def _encoding(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> Any:
    with needed_for("TikTokenizer", "tiktoken"):
        import tiktoken
    try:
        return tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
    except Exception as error:  # the library defines no exception type
        raise DataError(f"{name} is not a vocabulary of tiktoken: {error}") from error


@TOKENIZERS.register(
    "TikTokenizer",
    about=Takes(
        (("tokenizer_model", "vocab_file"),),
        (
            *("vocab_size", "tiktoken_pattern"),
            *("tiktoken_num_special_tokens", "tiktoken_special_tokens"),
        ),
    ),
)
def _build_tiktoken(options: TokenizerOptions) -> Tokenizer:
    return TikTokenizer(
        str(options.tokenizer_model or options.vocab_file),
        pattern=options.tiktoken_pattern,
        vocab_size=options.vocab_size,
        num_special_tokens=options.tiktoken_num_special_tokens,
        special_tokens=options.tiktoken_special_tokens,
    )
