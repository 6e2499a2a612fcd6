"""Which tokenizer, decided."""

from typing import Any

from megatron.config.tokenizer import TokenizerConfig


def tokenizer_arguments(config: TokenizerConfig, *, default: str | None = None) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer`; the rarer ones only where they were said.

    Args:
        default: the type when none is said.
    """
    rarer: dict[str, Any] = {
        "tokenizer_model": config.tokenizer_model,
        "tokenizer_kwargs": config.tokenizer_kwargs,
        "vocab_size": config.vocab_size,
        "vocab_extra_ids": config.vocab_extra_ids or None,
        "tiktoken_pattern": config.tiktoken_pattern,
        "tiktoken_num_special_tokens": config.tiktoken_num_special_tokens,
        "tiktoken_special_tokens": config.tiktoken_special_tokens,
        "tokenizer_backend": None
        if config.tokenizer_backend == "auto"
        else config.tokenizer_backend,
    }
    return {
        "tokenizer_type": config.tokenizer_type or default,
        "vocab_file": config.vocab_file,
        "merge_file": config.merge_file,
        "tokenizer_name_or_path": config.tokenizer_name_or_path,
        **{name: value for name, value in rarer.items() if value is not None},
    }


def gpt_tokenizer_arguments(config: TokenizerConfig) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer` for GPT: GPT-2's tokenizer when none is said."""
    return tokenizer_arguments(config, default="GPT2BPETokenizer")
