"""From what was asked for to a tokenizer."""

from collections.abc import Iterator

from megatron.errors import raise_if_any
from megatron.tokenizer.gpt2 import GPT2BPETokenizer
from megatron.tokenizer.hugging_face import PretrainedFromHF
from megatron.tokenizer.tokenizer import Tokenizer


def build_tokenizer(
    *,
    tokenizer_type: str | None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_name_or_path: str | None = None,
) -> Tokenizer:
    """Return the tokenizer of this type.

    Raises:
        ConfigError: a flag that this type needs is missing.
        DataError: its files are missing or damaged.
    """
    raise_if_any(
        tokenizer_problems(
            tokenizer_type=tokenizer_type,
            vocab_file=vocab_file,
            merge_file=merge_file,
            tokenizer_name_or_path=tokenizer_name_or_path,
        )
    )
    if tokenizer_type == "GPT2BPETokenizer":
        return GPT2BPETokenizer(str(vocab_file), str(merge_file))
    return PretrainedFromHF(str(tokenizer_name_or_path))


def tokenizer_problems(
    *,
    tokenizer_type: str | None,
    vocab_file: str | None,
    merge_file: str | None,
    tokenizer_name_or_path: str | None,
) -> Iterator[str]:
    """Yield one sentence for each thing that keeps `build_tokenizer` from starting."""
    if tokenizer_type == "GPT2BPETokenizer":
        needed = {"--vocab-file": vocab_file, "--merge-file": merge_file}
    elif tokenizer_type == "PretrainedFromHF":
        needed = {"--tokenizer-name-or-path": tokenizer_name_or_path}
    else:
        known = "GPT2BPETokenizer or PretrainedFromHF"
        yield f"--tokenizer-type {tokenizer_type or 'is missing'}: give {known}"
        return
    missing = [flag for flag, value in needed.items() if not value]
    if missing:
        yield (
            f"--tokenizer-type {tokenizer_type} needs {' and '.join(needed)}; "
            f"{' and '.join(missing)} missing"
        )
