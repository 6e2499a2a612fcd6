"""Low-rank adapters (LoRA): flags, and the layers that get them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.config.network.spec_part import LINEAR_LAYERS, SpecPart
from megatron.config.parsing.declaration import resolve, setting


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: low-rank adapters added to the linear layers."""

    lora_rank: int = setting(0, at_least=0)
    """Rank of the adapters; 0 for none. With adapters, all other weights are frozen."""

    lora_alpha: float | None = setting(None, above=0, matters=False)
    """Scale of the adapters' output: --lora-alpha / --lora-rank (default: 1)."""

    lora_dropout: float = setting(0.0, at_least=0, below=1, matters=False, in_weights=False)
    """Dropout probability of an adapter's input features."""

    lora_target_modules: list[str] | None = None
    """Linear layers that get adapters: query_key_value, dense, dense_h_to_4h, dense_4h_to_h, or
    their names in Hugging Face's models, such as q_proj k_proj v_proj, or all-linear (default:
    query_key_value)."""


@dataclass(frozen=True, kw_only=True)
class LoraSpec(SpecPart):
    """Low-rank adapters (LoRA)."""

    section: ClassVar[str] = "lora"

    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = ()  # linear layers with an adapter

    @classmethod
    def of(cls, config: Any) -> "LoraSpec | None":
        """Return the adapters of a network; None without: see `SpecPart`."""
        return lora_spec(config.lora)

    @property
    def flags(self) -> str:
        """The flags that choose the layers with adapters."""
        return f"--lora-rank with --lora-target-modules {' '.join(self.lora_target_modules)}"

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.lora_alpha / self.lora_rank


FUSED = {
    "query_key_value": (("q_proj", "k_proj", "v_proj"), ("c_attn",)),
    "dense": (("o_proj",), ("c_proj",)),
    "dense_h_to_4h": (("gate_proj", "up_proj"), ("c_fc",)),
    "dense_4h_to_h": (("down_proj",), ("c_proj",)),
}
"""Their names in Hugging Face's models; several are one matrix here, and get one adapter."""

ALL = "all-linear"


def lora_targets(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the linear layers that `names` selects, in the order of the network.

    >>> lora_targets(["q_proj", "k_proj", "v_proj", "down_proj"])
    ('query_key_value', 'dense_4h_to_h')
    """
    given = {"query_key_value"} if names is None else set(names)
    return tuple(
        own
        for own in LINEAR_LAYERS
        if given & {own, ALL} or any(given.issuperset(theirs) for theirs in FUSED[own])
    )


def lora_spec(lora: LoraConfig) -> LoraSpec | None:
    """Return the adapters of a network; None without."""
    if not lora.lora_rank:
        return None
    return resolve(
        LoraSpec,
        "model",
        lora,
        lora_alpha=float(lora.lora_alpha or lora.lora_rank),
        lora_target_modules=lora_targets(lora.lora_target_modules),
    )
