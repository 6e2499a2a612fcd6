"""The tokenizer: its flags, the arguments of build_tokenizer, and the padded vocabulary."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from megatron.common.registry import TOKENIZERS
from megatron.config.parsing.declaration import setting


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer and its vocabulary."""

    tokenizer_type: str | None = None
    """How text becomes tokens: BertWordPieceLowerCase, BertWordPieceCase, GPT2BPETokenizer,
    PretrainedFromHF (or HuggingFaceTokenizer), SentencePieceTokenizer (or
    GPTSentencePieceTokenizer), Llama2Tokenizer, TikTokenizer or NullTokenizer. (default:
    BertWordPieceLowerCase for objectives on sentences, GPT2BPETokenizer for others)."""

    vocab_file: str | None = setting(None, older=("--vocab",))
    """Vocabulary. GPT2BPETokenizer: a JSON object, token to id. BertWordPiece: one token a line.
    TikTokenizer: as --tokenizer-model."""

    merge_file: str | None = None
    """Merges of GPT2BPETokenizer: one pair a line, the most frequent first."""

    tokenizer_name_or_path: str | None = None
    """Tokenizer of PretrainedFromHF: a directory, or a name on the Hugging Face hub."""

    tokenizer_model: str | None = None
    """Model file of SentencePieceTokenizer, GPTSentencePieceTokenizer and Llama2Tokenizer (.model),
    or of TikTokenizer (.tiktoken, or Megatron-LM's .json); the directory of HuggingFaceTokenizer, or
    its name on the Hugging Face hub."""

    tokenizer_sentencepiece_legacy: bool = False
    """Tokens as Megatron-LM made them until 2025: SentencePieceTokenizer adds <CLS>, <SEP>, <EOD>
    and <MASK> to the model and ends documents with <EOD>; Llama2Tokenizer begins each text with
    bos. Without it both write the model's own tokens, and eos ends a document."""

    tokenizer_kwargs: list[str] | None = None
    """Alternating names and values, such as pad_token <pad>, given to transformers when it loads the
    tokenizer of PretrainedFromHF; true, false and integers are not text."""

    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out the special tokens that the tokenizer of PretrainedFromHF adds to each text."""

    vocab_size: int | None = None
    """NullTokenizer: texts are numbers from 0 to this, which is the end of a document. TikTokenizer
    of a .json file: ids in all, special tokens included (default: 131072)."""

    vocab_extra_ids: int | None = None
    """Number of tokens <extra_id_0>, <extra_id_1> and so on to add to the vocabulary, the
    sentinels of spans (default: 100 where a decoder restores spans, which needs at least one; else 0)."""

    tiktoken_pattern: Literal["v1", "v2", "r50k", "cl100k", "o200k"] | None = None
    """How TikTokenizer splits words (default: by the file's name, for OpenAI's encodings)."""

    tiktoken_num_special_tokens: int | None = None
    """Ids that TikTokenizer of a .json file keeps for special tokens, before all others (default:
    1000)."""

    tiktoken_special_tokens: list[str] | None = setting(None, older=("--special-tokens",))
    """Special tokens of TikTokenizer: the first ids of a .json file (default: <unk> <s> </s>); the ids
    after the last of a .tiktoken file."""

    tokenizer_backend: Literal["auto", "fast", "reference"] = "auto"
    """Which library encodes byte-level BPE: fast is gigatoken, or an error where it does not give
    the ids of the reference; auto then takes the reference and logs it."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-model-parallel size."""

    pad_vocab_size_to: int | None = setting(None, plan="model.padded_vocab_size")
    """Rows of the padded vocabulary, so that they do not depend on the layout; rounded up to a
    multiple of the tensor-model-parallel size."""

    true_vocab_size: int | None = None
    """Rows of the token table that are weights of the network; all others are padding (default: the
    vocabulary size of the tokenizer). Models of transformers may have more rows than their tokenizer
    has tokens."""

    padded_vocab_in_softmax: bool | None = setting(None, with_truth=True, in_weights=False)
    """Let the padded vocabulary columns take part in the softmax of the training loss, as in
    Megatron-LM. Without the flag it is as in the run that is continued; a new run leaves them out, so
    that the loss does not depend on the padding."""


_WITH_LEGACY = ("SentencePieceTokenizer", "Llama2Tokenizer")
"""Types whose tokens depend on --tokenizer-sentencepiece-legacy."""


def without_idle_fields(config: TokenizerConfig) -> tuple[TokenizerConfig, list[str]]:
    """Return `config` without the flags of TikTokenizer beside another type, and a notice of each.

    For runs and their plans: scripts of Megatron-LM give them there, where they have no effect
    either. `build_tokenizer` refuses them.
    """
    kind = config.tokenizer_type
    if kind == "TikTokenizer" or TOKENIZERS.is_own(kind):
        return config, []
    names = (field.name for field in fields(config) if field.name.startswith("tiktoken_"))
    idle: dict[str, Any] = {name: None for name in names if getattr(config, name) is not None}
    effect = "has no effect without --tokenizer-type TikTokenizer"
    return replace(config, **idle), [f"--{name.replace('_', '-')} {effect}" for name in idle]


def tokenizer_arguments(config: TokenizerConfig, *, default: str | None = None) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer`; the rarer ones only where they are given.

    Args:
        default: the type without --tokenizer-type.
    """
    rarer: dict[str, Any] = {
        "tokenizer_model": config.tokenizer_model,
        "tokenizer_sentencepiece_legacy": config.tokenizer_sentencepiece_legacy or None,
        "tokenizer_kwargs": config.tokenizer_kwargs,
        "tokenizer_hf_no_include_special_tokens": (
            config.tokenizer_hf_no_include_special_tokens or None
        ),
        "vocab_size": config.vocab_size,
        "vocab_extra_ids": config.vocab_extra_ids,
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
    return _hugging_face_arguments(with_sentencepiece_form(arguments, is_legacy=False))


def with_sentencepiece_form(arguments: Mapping[str, Any], *, is_legacy: bool) -> dict[str, Any]:
    """Return `arguments` with `tokenizer_sentencepiece_legacy`, if the type has a legacy form.

    Args:
        is_legacy: the value where `arguments` have none; True for token files and checkpoints that
            were written before there was the flag.
    """
    if arguments.get("tokenizer_type") not in _WITH_LEGACY:
        return dict(arguments)
    return {"tokenizer_sentencepiece_legacy": is_legacy, **arguments}


def _hugging_face_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
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


def true_vocab_size(tokenizer: TokenizerConfig, known: int) -> int:
    """Return the rows of the token table without padding, for a tokenizer of `known` tokens."""
    return known if tokenizer.true_vocab_size is None else tokenizer.true_vocab_size


def padded_vocab_size(
    vocab_size: int, *, divisible_by: int, tensor: int, pad_to: int | None = None
) -> int:
    """Return the next multiple of `divisible_by` * `tensor` from `vocab_size` up.

    With `pad_to` it is the next multiple of `tensor` from there up.

    >>> padded_vocab_size(50257, divisible_by=128, tensor=2)
    50432
    >>> padded_vocab_size(50257, divisible_by=128, tensor=2, pad_to=50257)
    50258
    """
    least, multiple = (pad_to, tensor) if pad_to else (vocab_size, divisible_by * tensor)
    return -(-least // multiple) * multiple


def vocab_problems(tokenizer: TokenizerConfig, *, vocab_size: int) -> Iterator[str]:
    """Yield every reason why the vocabulary cannot be padded."""
    pad_to, divisor = tokenizer.pad_vocab_size_to, tokenizer.make_vocab_size_divisible_by
    rows = true_vocab_size(tokenizer, vocab_size)
    if rows < vocab_size:
        yield f"--true-vocab-size {rows} is less than the tokenizer's {vocab_size} tokens"
    if divisor < 1:
        yield f"--make-vocab-size-divisible-by {divisor} must be at least 1"
    elif pad_to is not None:
        if pad_to < vocab_size:
            yield f"--pad-vocab-size-to {pad_to} is less than the tokenizer's {vocab_size} tokens"
        elif pad_to < rows:
            yield f"--pad-vocab-size-to {pad_to} is less than --true-vocab-size {rows}"
        if pad_to % divisor:
            yield (
                f"--pad-vocab-size-to: {pad_to} is not divisible by {divisor} "
                "(--make-vocab-size-divisible-by)"
            )


def vocab_notices(tokenizer: TokenizerConfig, *, padded: int) -> Iterator[str]:
    """Yield notices about the padded vocabulary of `padded` rows."""
    pad_to = tokenizer.pad_vocab_size_to
    if pad_to and padded != pad_to:
        yield (
            f"--pad-vocab-size-to {pad_to} is rounded up to {padded}, which the tensor-parallel "
            "ranks divide evenly"
        )
