"""Which tokenizer, decided."""

from megatron.config.tokenizer import TokenizerConfig


def tokenizer_arguments(
    config: TokenizerConfig, *, default: str | None = None
) -> dict[str, str | None]:
    """Return the arguments of `build_tokenizer`.

    Args:
        default: the type when none is said.
    """
    return {
        "tokenizer_type": config.tokenizer_type or default,
        "vocab_file": config.vocab_file,
        "merge_file": config.merge_file,
        "tokenizer_name_or_path": config.tokenizer_name_or_path,
    }


def gpt_tokenizer_arguments(config: TokenizerConfig) -> dict[str, str | None]:
    """Return the arguments of `build_tokenizer` for GPT: GPT-2's tokenizer when none is said."""
    return tokenizer_arguments(config, default="GPT2BPETokenizer")
