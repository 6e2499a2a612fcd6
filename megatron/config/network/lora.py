"""Small matrices beside the linear layers, trained in the place of these."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, as the user asked for them."""

    lora_rank: int = 0
    """Rank of the product that is added to a weight; 0 for none. With it everything but these
    adapters is frozen."""

    lora_alpha: float | None = None
    """The product counts --lora-alpha / --lora-rank times (default: once)."""

    lora_dropout: float = 0.0
    """Share of the features in front of an adapter that are dropped."""

    lora_target_modules: list[str] | None = None
    """Linear layers that get adapters: query_key_value, dense, dense_h_to_4h, dense_4h_to_h, or
    their names in Hugging Face's models, such as q_proj k_proj v_proj, or all-linear (default:
    query_key_value)."""
