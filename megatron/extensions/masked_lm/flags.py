"""Masked language modelling (BERT, T5): flags of the samples, resolution and checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, setting


@dataclass(frozen=True, kw_only=True)
class MaskedLMConfig:
    """Samples of masked sentences (pretrain_bert.py, pretrain_t5.py)."""

    mask_prob: float = setting(0.15, above=0, below=1)
    """Share of the tokens that are masked (BERT) or replaced by sentinels (T5)."""

    short_seq_prob: float = setting(0.1, at_least=0, at_most=1)
    """Share of the samples that are cut to a random shorter length; in effect 1 / n for the integer
    n next to 1 / this."""

    bert_binary_head: bool = setting(True, flag="--bert-no-binary-head", plan="model.binary_head")
    """BERT's sentence-order prediction: binary head, pooler and token types. Without it, samples may
    have a single sentence."""

    decoder_seq_length: int | None = setting(None, at_least=1)
    """Length of the decoder's samples in tokens (T5)."""


@dataclass(frozen=True, kw_only=True)
class MaskedLMPlan:
    """Masked samples, resolved; lengths are those of padded samples."""

    mask_prob: float
    has_binary_head: bool  # sentence order is predicted
    seq_length: int  # of BERT's samples, or those of T5's encoder
    decoder_seq_length: int  # 0: there is no decoder


@dataclass(frozen=True, kw_only=True)
class SentencePlan:
    """How documents of sentences are cut into samples."""

    num_special: int = 0  # tokens that a sample has besides its text
    min_sentences: int = 1  # of a sample
    short_seq_prob: float = 0.0  # share of the samples with a random shorter length


NO_SENTENCES = SentencePlan()
"""Of objectives whose documents are not cut into sentences."""


def plan_masked_lm(config: MaskedLMConfig, name: str, *, seq_length: int) -> MaskedLMPlan:
    """Return the masked samples of the objective `name`."""
    return MaskedLMPlan(
        mask_prob=config.mask_prob,
        has_binary_head=name == "bert" and config.bert_binary_head,
        seq_length=seq_length,
        decoder_seq_length=config.decoder_seq_length or 0,
    )


def plan_sentences(config: MaskedLMConfig, name: str) -> SentencePlan:
    """Return how the objective `name` cuts documents of sentences."""
    if name == "bert":  # [CLS], [SEP] and a second [SEP]
        return SentencePlan(
            num_special=3,
            min_sentences=2 if config.bert_binary_head else 1,
            short_seq_prob=config.short_seq_prob,
        )
    if name == "t5":  # which keeps room for two tokens in the encoder
        return SentencePlan(num_special=2, short_seq_prob=config.short_seq_prob)
    return NO_SENTENCES


def masked_lm_problems(config: MaskedLMConfig, name: str, *, seq_length: int) -> Iterator[str]:
    """Yield why masked samples of `seq_length` tokens cannot be made."""
    yield from range_problems(config)
    fewest = plan_sentences(config, name).num_special + 2
    if seq_length < fewest:
        yield f"--seq-length {seq_length} must be at least {fewest} for samples of sentences"
    if name == "t5" and config.decoder_seq_length is None:
        yield "--decoder-seq-length is missing: the length of the decoder's samples, such as 128"
