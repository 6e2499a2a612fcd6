"""T5's objective: its samples and flags, without torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.common.registry import OBJECTIVES
from megatron.config.config import Config
from megatron.extensions.masked_lm.declarations import SentenceDeclaration
from megatron.extensions.masked_lm.flags import MaskedLMConfig, MaskedLMPlan, SentencePlan
from megatron.extensions.t5.flags import t5_samples, t5_sentences


@dataclass(frozen=True, kw_only=True)
class T5Declaration(SentenceDeclaration):
    """Spans of the encoder's text, which the decoder restores."""

    def plan(self, config: Config) -> MaskedLMPlan:
        """Return the masked samples."""
        return t5_samples(config.section(MaskedLMConfig), seq_length=config.model.seq_length)

    def cut(self, config: Config) -> SentencePlan:
        """Return how documents are cut into samples."""
        return t5_sentences(config.section(MaskedLMConfig))

    def problems(self, config: Config) -> Iterator[str]:
        """Yield why no samples can be made for an encoder and a decoder."""
        yield from super().problems(config)
        if config.section(MaskedLMConfig).decoder_seq_length is None:
            yield "--decoder-seq-length is missing: the length of the decoder's samples, such as 128"


OBJECTIVES.declare(
    "t5",
    "megatron.extensions.t5.objective",
    T5Declaration(
        script="pretrain_t5.py",
        network="t5",
        flags=("--mask-prob", "--short-seq-prob", "--decoder-seq-length"),
        view="megatron.extensions.t5.data.span_view",
        extra_ids=100,
        weighs_tokens=True,
    ),
)
