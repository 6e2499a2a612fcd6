"""Flags of BERT and of masked sentences, and their effect on its samples."""

from dataclasses import dataclass
from typing import Literal

from megatron.extensions.masked_lm.flags import MaskedLMConfig, MaskedLMPlan, SentencePlan

SECTIONS = {"masked_lm": MaskedLMConfig}


@dataclass(frozen=True, kw_only=True)
class BertSpec:
    """Segments of a sample, and heads of pretraining."""

    num_token_types: int = 0  # rows of the table of segments; 0: there is none
    binary_head: bool = False  # pooler and classifier of the order of two segments
    head_activation: Literal["gelu_erf", "gelu_tanh"] = "gelu_erf"  # before the logits


def bert_samples(masked: MaskedLMConfig, *, seq_length: int) -> MaskedLMPlan:
    """Return the masked samples of BERT."""
    return MaskedLMPlan(
        mask_prob=masked.mask_prob,
        has_binary_head=masked.bert_binary_head,
        seq_length=seq_length,
        decoder_seq_length=0,
    )


def bert_sentences(masked: MaskedLMConfig) -> SentencePlan:
    """Return how documents are cut, with room for [CLS], [SEP] and a second [SEP]."""
    return SentencePlan(
        num_special=3,
        min_sentences=2 if masked.bert_binary_head else 1,
        short_seq_prob=masked.short_seq_prob,
    )
