"""Which tokenizer, decided."""

from collections.abc import Mapping
from typing import Any

from megatron.config.data.tokenizer import TokenizerConfig

_WITH_LEGACY = ("SentencePieceTokenizer", "Llama2Tokenizer")
"""Types whose tokens depend on --tokenizer-sentencepiece-legacy."""


def tokenizer_arguments(config: TokenizerConfig, *, default: str | None = None) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer`; the rarer ones only where they were said.

    Args:
        default: the type when none is said.
    """
    rarer: dict[str, Any] = {
        "tokenizer_model": config.tokenizer_model,
        "tokenizer_sentencepiece_legacy": config.tokenizer_sentencepiece_legacy or None,
        "tokenizer_kwargs": config.tokenizer_kwargs,
        "tokenizer_hf_no_include_special_tokens": (
            config.tokenizer_hf_no_include_special_tokens or None
        ),
        "vocab_size": config.vocab_size,
        "vocab_extra_ids": config.vocab_extra_ids or None,
        "tiktoken_pattern": config.tiktoken_pattern,
        "tiktoken_num_special_tokens": config.tiktoken_num_special_tokens,
        "tiktoken_special_tokens": config.tiktoken_special_tokens,
        "tokenizer_backend": None
        if config.tokenizer_backend == "auto"
        else config.tokenizer_backend,
    }
    arguments = {
        "tokenizer_type": config.tokenizer_type or default,
        "vocab_file": config.vocab_file,
        "merge_file": config.merge_file,
        "tokenizer_name_or_path": config.tokenizer_name_or_path,
        **{name: value for name, value in rarer.items() if value is not None},
    }
    return _of_hugging_face(with_sentencepiece_form(arguments, is_legacy=False))


def with_sentencepiece_form(arguments: Mapping[str, Any], *, is_legacy: bool) -> dict[str, Any]:
    """Return `arguments` with `tokenizer_sentencepiece_legacy`, if the type has a legacy form.

    Args:
        is_legacy: the value where `arguments` have none; True for token files and checkpoints that
            were written before there was the flag.
    """
    if arguments.get("tokenizer_type") not in _WITH_LEGACY:
        return dict(arguments)
    return {"tokenizer_sentencepiece_legacy": is_legacy, **arguments}


def _of_hugging_face(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return `arguments` with Megatron-LM's name of PretrainedFromHF replaced, and its path."""
    name = arguments.get("tokenizer_model")
    if (
        arguments["tokenizer_type"] != "HuggingFaceTokenizer"
        or name is None
        or arguments["tokenizer_name_or_path"] is not None
    ):
        return arguments
    others = {key: value for key, value in arguments.items() if key != "tokenizer_model"}
    return {**others, "tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": name}


def gpt_tokenizer_arguments(config: TokenizerConfig) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer` for GPT: GPT-2's tokenizer when none is said."""
    return tokenizer_arguments(config, default="GPT2BPETokenizer")
