"""Masked language modelling (BERT, T5): flags and plans of the samples."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.config.parsing.declaration import setting


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig:
    """Samples of masked sentences (pretrain_bert.py, pretrain_t5.py)."""

    mask_prob: float = setting(0.15, above=0, below=1)
    """Share of the tokens that are masked (BERT) or replaced by sentinels (T5)."""

    short_seq_prob: float = setting(0.1, at_least=0, at_most=1)
    """Fraction of the samples that are cut to a random shorter length, rounded to 1 / n for an
    integer n."""

    bert_binary_head: bool = setting(True, flag="--bert-no-binary-head", plan="model.binary_head")
    """Train without BERT's sentence-order prediction: no binary head, pooler or token types. Samples may
    then have a single sentence."""

    decoder_seq_length: int | None = setting(None, at_least=1)
    """Length of the decoder's samples in tokens (T5)."""


@dataclass(frozen=True, kw_only=True)
class MaskedLMPlan:
    """Masked samples, resolved; lengths are of padded samples."""

    mask_prob: float
    has_binary_head: bool  # sentence order is predicted
    seq_length: int  # of BERT's samples, or of T5's encoder
    decoder_seq_length: int  # 0: there is no decoder


@dataclass(frozen=True, kw_only=True)
class SentencePlan:
    """How documents of sentences are cut into samples."""

    flags: ClassVar[str] = "--short-seq-prob or --bert-no-binary-head"
    """Flags that decide it."""

    num_special: int = 0  # tokens that a sample has besides its text
    min_sentences: int = 1  # of a sample
    short_seq_prob: float = 0.0  # share of the samples with a random shorter length


SECTIONS = {"masked_lm": MaskedLMConfig}
