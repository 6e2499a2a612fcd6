"""Layer patterns of hybrid networks: the letters of layers, borders of pipeline stages, and what follows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.parallelism.pipeline import LAYERS

MAMBA, DELTA_NET, ATTENTION, MLP, EXPERTS = "MG*-E"
RECURRENT = (MAMBA, DELTA_NET)
KINDS = (*RECURRENT, ATTENTION, MLP, EXPERTS)
CHUNK = 64
"""Positions of a recurrent layer that are computed at once: products inside grow with their square."""

_BORDER, _DEPTH = "|/"
_ELSEWHERE = {
    "D": "sparse attention is not built",
    "+": "attention is latent with --multi-latent-attention in networks of attention alone",
}
"""Letters of Megatron-LM's patterns that are refused, and why."""


@dataclass(frozen=True)
class LayerPattern:
    """A pattern as Megatron-LM writes it: layers, with | between the layers of stages or chunks.

    Args:
        stages: those of the command line.
    """

    text: str
    stages: int = 1

    @property
    def parts(self) -> list[str]:
        """The letters of each stage or chunk, without depths of multi-token prediction."""
        return self.text.partition(_DEPTH)[0].split(_BORDER)

    @property
    def letters(self) -> str:
        """The letters of all layers."""
        return "".join(self.parts)

    def problems(self) -> Iterator[str]:
        """Yield why the pattern is not of layers that are built."""
        if depths := self.text.count(_DEPTH):
            yield (
                f"--hybrid-layer-pattern {self.text} has {_DEPTH}: {depths} layers of multi-token "
                f"prediction are not built for this network: write {self.text.partition('/')[0]}"
            )
        for letter in dict.fromkeys(self.letters):
            if letter not in KINDS:
                reason = _ELSEWHERE.get(letter, "known are M, G, *, - and E")
                yield f"--hybrid-layer-pattern {self.text} has {letter}: {reason}"

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of flags that the pattern decides where they are not given, by field."""
        return {"network": "hybrid", "num_layers": len(self.letters), **self._division}

    @property
    def _division(self) -> dict[str, Any]:
        parts, stages = len(self.parts), max(1, self.stages)
        if parts == 1 or parts % stages:
            return {}
        chunks = parts // stages
        return {
            "pp_partition_method": LAYERS + ",".join(str(len(part)) for part in self.parts),
            **({"num_virtual_stages_per_pipeline_rank": chunks} if chunks > 1 else {}),
            "num_layers_per_virtual_pipeline_stage": None,
            "pipeline_model_parallel_layout": None,
        }

    def contradictions(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the flags that divide the layers in another way, and a wrong number of stages.

        Args:
            values: of all flags, by field.
        """
        parts, stages = len(self.parts), values["pipeline_model_parallel_size"]
        if parts > 1 and (stages == 1 or parts % max(1, stages)):
            yield (
                f"--pipeline-model-parallel-size {stages}: {_BORDER} in --hybrid-layer-pattern "
                f"{self.text} makes {parts} stages: write --pipeline-model-parallel-size {parts}, or "
                f"--hybrid-layer-pattern={self.letters}"
            )
            return
        for field, value in self._division.items():
            if values[field] != value:
                yield (
                    f"--{field.replace('_', '-')} {values[field]}: {_BORDER} in "
                    f"--hybrid-layer-pattern {self.text} divides the layers: leave one of them out"
                )
