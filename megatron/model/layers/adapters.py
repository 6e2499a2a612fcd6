"""Which linear layers of a network have an adapter."""

from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.adapters import Adapter
from megatron.tensor_parallel.rng import RngTracker


def adapter_of(spec: ModelSpec, name: str, rng: RngTracker) -> Adapter | None:
    """Return the adapter of the linear layer `name`; None if it has none.

    Args:
        rng: the stream that differs between tensor-parallel ranks.
    """
    if name not in spec.lora_target_modules:
        return None
    return Adapter(spec.lora_rank, spec.lora_scale, spec.lora_dropout, rng)
