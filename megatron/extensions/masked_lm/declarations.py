"""Common base of the objectives on documents of sentences."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.common.registry import KINDS
from megatron.config.config import Config
from megatron.config.objectives import Declaration
from megatron.config.parsing.declaration import range_problems
from megatron.extensions.masked_lm.flags import MaskedLMConfig, SentencePlan

KINDS.declare("sentences", "megatron.extensions.masked_lm.data", ("",))


@dataclass(frozen=True, kw_only=True)
class SentenceDeclaration(Declaration, ABC):
    """An objective on samples of consecutive sentences."""

    kind: str = "sentences"
    tokenizer: str = "BertWordPieceLowerCase"

    @abstractmethod
    def cut(self, config: Config) -> SentencePlan:
        """Return how documents are cut into samples."""

    def problems(self, config: Config) -> Iterator[str]:
        """Yield why no masked samples can be made."""
        yield from range_problems(config.section(MaskedLMConfig))
        fewest = self.cut(config).num_special + 2
        if config.model.seq_length < fewest:
            yield (
                f"--seq-length {config.model.seq_length} must be at least {fewest} for samples of "
                "sentences"
            )

    def upgrade_1_0(self, plan: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a plan of version 1.0, which had masks and sentences among the parts of every run."""
        objective, data = dict(plan["objective"]), dict(plan.get("data", {}))
        objective["own"], data["cut"] = objective.get("masked"), data.get("sentences")
        return {**plan, "objective": objective, "data": data}
