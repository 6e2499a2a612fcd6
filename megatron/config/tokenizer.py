"""Which tokenizer, and how large its vocabulary becomes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer, as the user asked for it."""

    tokenizer_type: Literal["GPT2BPETokenizer", "PretrainedFromHF"] | None = None
    """How text becomes tokens; GPT2BPETokenizer in GPT training when not said."""

    vocab_file: Annotated[str | None, Spelling("--vocab-file", ("--vocab",))] = None
    """Vocabulary of GPT2BPETokenizer: a JSON object, token to id."""

    merge_file: str | None = None
    """Merges of GPT2BPETokenizer: one pair a line, the most frequent first."""

    tokenizer_name_or_path: str | None = None
    """Tokenizer of PretrainedFromHF: a directory, or a name on the Hugging Face hub."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-model-parallel size."""

    pad_vocab_size_to: int | None = None
    """Exact size of the padded vocabulary, so that it does not depend on the layout."""
