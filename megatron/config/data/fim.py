"""Fill-in-the-middle: documents rearranged so that their middle comes last."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """Fill-in-the-middle: the share of documents, and the special tokens."""

    fim_rate: float = 0.0
    """Share of documents that are rearranged for fill-in-the-middle."""

    fim_spm_rate: float = 0.5
    """Share of those in which the suffix comes before the prefix."""

    fim_split_sample: str | None = None
    """Token that cuts a document, such as a repository, into fragments that are rearranged apart
    (default: not cut)."""

    fragment_fim_rate: Annotated[
        float, Spelling("--fragment-fim-rate", ("--fim-fragment-rate",))
    ] = 0.5
    """Share of the fragments of a chosen document that are rearranged."""

    no_fim_prefix: Annotated[str | None, Spelling("--no-fim-prefix", ("--fim-no-prefix",))] = None
    """Leave fragments that start with this text as they are."""

    fim_cut: Literal["characters", "tokens"] = "characters"
    """Where documents may be cut: between any two characters, or only between two tokens."""

    fim_prefix_token: str | None = None
    """Token before the prefix (default: <fim_prefix> in one of its usual spellings)."""

    fim_middle_token: str | None = None
    """Token before the middle (default: <fim_middle> in one of its usual spellings)."""

    fim_suffix_token: str | None = None
    """Token before the suffix (default: <fim_suffix> in one of its usual spellings)."""

    fim_pad_token: str | None = None
    """Token that fills up a sample that became shorter (default: <fim_pad> in one of its usual
    spellings, or else the tokenizer's padding, or the end of a document)."""
