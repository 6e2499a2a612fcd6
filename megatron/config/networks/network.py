"""The contract of a network: its architecture, and how flags make it.

A network is a class in NETWORKS: of a file here, or of a plugin.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.common.registry import NETWORKS
from megatron.config.config import Config
from megatron.config.network.experts import ExpertConfig
from megatron.config.network.lora import LoraConfig
from megatron.config.network.model import ModelConfig, resolve_model
from megatron.config.network.model_spec import ModelSpec
from megatron.config.networks.architecture import Architecture
from megatron.config.networks.options import ignored_options
from megatron.config.objectives import Declaration


class Network(Architecture):
    """A network that is trained: a GPT, unless a subclass says otherwise.

    A subclass is registered in NETWORKS with its `name`. Flags of its own are an argument `flags`.
    """

    def problems(self, config: Config) -> Iterator[str]:
        """Yield the flags that this network does not have, and wrong values of its own."""
        return iter(())

    @classmethod
    def misplaced(cls, config: Config) -> Iterator[str]:
        """Yield this network's own flags, given to another one."""
        return iter(())

    def spec(self, plain: ModelSpec, config: Config) -> ModelSpec:
        """Return this network, given what all networks have in common."""
        return replace(plain, architecture=self.name)

    def without_head(self, spec: ModelSpec) -> ModelSpec:
        """Return a spec of this network without what only its own head has."""
        return spec

    def num_layers(self, config: Config) -> int:
        """Return the number of layers that pipeline stages divide."""
        return config.model.num_layers


def plain_spec(config: Config, *, vocab_size: int, tensor: int) -> ModelSpec:
    """Return what all networks of `config` have in common, as a GPT."""
    return resolve_model(
        config.model,
        config.experts,
        config.lora,
        config.tokenizer,
        vocab_size=vocab_size,
        tensor=tensor,
        norms_embedding=config.optimizer.use_bnb_optimizer,
    )


def option_problems(network: Network, config: Config) -> Iterator[str]:
    """Yield the options of a valid config that its network does not have."""
    model = config.model
    bare = replace(
        config,
        model=ModelConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            seq_length=model.seq_length,
        ),
        experts=ExpertConfig(),
        lora=LoraConfig(),
    )
    given, plain = (
        network.spec(plain_spec(each, vocab_size=1, tensor=1), each) for each in (config, bare)
    )
    return ignored_options(given, plain, network.options, network.lacks)


def network_for(declared: Declaration, extensions: Mapping[str, Any]) -> Network:
    """Return the network that an objective trains.

    Args:
        extensions: instances of the plugins' sections of flags, by the name of their class.
    """
    own = NETWORKS.flags_of(declared.network, extensions)
    network: Network = declared.network_with_head(NETWORKS.get(declared.network, own)())
    return network


def network_class(name: str) -> type[Network]:
    """Return the class of a network, for what does not depend on its flags."""
    found: type[Network] = NETWORKS.get_class(name)
    return found


def with_network(config: Config, model: Mapping[str, Any]) -> Config:
    """Return `config` with the network of a checkpoint, if it is that of a plugin.

    Args:
        model: the network as in a manifest's plan.
    """
    name = model.get("architecture", "gpt")
    if not NETWORKS.is_own(name):
        return config
    return replace(config, plugins=replace(config.plugins, network=name))
