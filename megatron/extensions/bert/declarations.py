"""BERT's objective: its samples and flags, without torch."""

from dataclasses import dataclass

from megatron.common.registry import FAMILIES, OBJECTIVES
from megatron.config.config import Config
from megatron.extensions.bert.flags import bert_samples, bert_sentences
from megatron.extensions.masked_lm.declarations import SentenceDeclaration
from megatron.extensions.masked_lm.flags import MaskedLMConfig, MaskedLMPlan, SentencePlan


@dataclass(frozen=True, kw_only=True)
class BertDeclaration(SentenceDeclaration):
    """Masked tokens, and the order of two segments."""

    def plan(self, config: Config) -> MaskedLMPlan:
        """Return the masked samples."""
        return bert_samples(config.section(MaskedLMConfig), seq_length=config.model.seq_length)

    def cut(self, config: Config) -> SentencePlan:
        """Return how documents are cut into samples."""
        return bert_sentences(config.section(MaskedLMConfig))


OBJECTIVES.declare(
    "bert",
    "megatron.extensions.bert.objective",
    BertDeclaration(
        script="pretrain_bert.py",
        network="bert",
        flags=("--mask-prob", "--short-seq-prob", "--bert-no-binary-head"),
        view="megatron.extensions.bert.data.masked_view",
        adds_special_tokens=True,
    ),
)
FAMILIES.declare("berts", "megatron.extensions.bert.checkpoints", None)
