"""The spec of the network that a config trains."""

from dataclasses import replace

from megatron.common.registry import (
    ACTIVATIONS,
    ATTENTIONS,
    NETWORKS,
    NORMS,
    POSITION_EMBEDDINGS,
)
from megatron.config.config import Config
from megatron.config.data.objective import ObjectiveName
from megatron.config.network.model_spec import ModelSpec
from megatron.config.network_contract import network_in, plain_spec, require_own_part


def plan_model(
    config: Config, *, vocab_size: int, tensor: int, objective: ObjectiveName = "gpt"
) -> ModelSpec:
    """Return the network of `config` for a tokenizer of `vocab_size` tokens.

    Raises:
        ConfigError: a network of a plugin contradicts itself.
    """
    network = network_in(config, objective)
    spec = network.spec(plain_spec(config, vocab_size=vocab_size, tensor=tensor), config)
    if NETWORKS.is_own(network.name):
        require_own_part(network, spec)
    kernel = config.kernels.attention_impl
    attention = replace(spec.attention, attention=kernel if ATTENTIONS.is_own(kernel) else "")
    own = (
        *NETWORKS.flags_of(network.name, config.extensions),
        *POSITION_EMBEDDINGS.flags_of(spec.positions.position_embedding, config.extensions),
        *ACTIVATIONS.flags_of(spec.mlp.activation, config.extensions),
        *NORMS.flags_of(spec.norm.normalization, config.extensions),
        *ATTENTIONS.flags_of(attention.attention, config.extensions),
    )
    flags = tuple(dict.fromkeys(own))
    return replace(spec, architecture=network.name, attention=attention, own_flags=flags)
