"""The contract of a network: its architecture, and how flags make it.

A network is a class in NETWORKS: `gpt.py`, or of an extension or a plugin.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron.common.errors import ConfigError
from megatron.common.registry import NETWORKS, OBJECTIVES
from megatron.config.architecture.architecture import Architecture
from megatron.config.architecture.options import ignored_options
from megatron.config.config import SECTIONS, Config
from megatron.config.data.objective import ObjectiveName
from megatron.config.flag_names import flag_setting
from megatron.config.network.model import ModelConfig
from megatron.config.network.model_problems import flag_problems
from megatron.config.network.model_resolution import position_of, resolve_model
from megatron.config.network.model_spec import OPTIONAL, ModelSpec, flat, names_of
from megatron.config.objectives import declaration_of


class Network(Architecture):
    """A network that is trained: a GPT, unless a subclass says otherwise.

    A subclass is registered in NETWORKS with its `name`, and its additional flags as `flags`.
    """

    has_decoder_stack: bool = False
    """Whether it is an encoder-decoder network, which takes `decoder_stack_flags`."""

    def problems(self, config: Config) -> Iterator[str]:
        """Yield the flags that this network does not have, and wrong values of the ones it has."""
        return iter(())

    @classmethod
    def misplaced_flags(cls, config: Config) -> Iterator[str]:
        """Yield flags of this network that are given to another one."""
        return iter(())

    def spec(self, plain: ModelSpec, config: Config) -> ModelSpec:
        """Return this network, given what all networks have in common."""
        return replace(plain, architecture=self.name)

    def without_head(self, spec: ModelSpec) -> ModelSpec:
        """Return a spec of this network without the parts of its head."""
        return spec

    def num_layers(self, config: Config) -> int:
        """Return the number of layers that pipeline stages divide."""
        return config.model.num_layers


def plain_spec(config: Config, *, vocab_size: int, tensor: int) -> ModelSpec:
    """Return the spec of a GPT with the options that all networks of `config` share."""
    return resolve_model(config.model, config, vocab_size=vocab_size, tensor=tensor)


def option_problems(network: Network, config: Config) -> Iterator[str]:
    """Return messages for the options of a valid config that its network does not have."""
    model = config.model
    bare = replace(
        config,
        model=ModelConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            seq_length=model.seq_length,
        ),
        **{
            name: SECTIONS[name]()
            for part in OPTIONAL.values()
            if (name := part.section) != "model"
        },
    )
    given, plain = (
        network.spec(plain_spec(each, vocab_size=1, tensor=1), each) for each in (config, bare)
    )
    ignored = ignored_options(given, plain, network.options)
    return (f"{flag} {network.lacks}" for flag in dict.fromkeys(map(flag_setting, ignored)))


def decoder_stack_problems(config: Config, network: Network) -> Iterator[str]:
    """Yield the flags of encoder-decoder networks, for a network that has one stack."""
    flags = {
        "--pipeline-model-parallel-split-rank": (
            config.parallel.pipeline_model_parallel_split_rank is not None
        ),
        "--position-embedding-type relative": position_of(config.model) == "relative",
    }
    if network.has_decoder_stack or not any(flags.values()):
        return
    # Including extensions, which a run without such flags does not import.
    declared = map(declaration_of, OBJECTIVES.with_extensions())
    scripts = [
        each.script for each in declared if NETWORKS.get_class(each.network).has_decoder_stack
    ]
    owner = " and ".join(scripts) or "other networks"
    reason = f"is for {owner}: this is not an encoder-decoder network"
    yield from flag_problems(flags, reason)


def network_in(config: Config, objective: ObjectiveName) -> Network:
    """Return the network that `config` and its objective name.

    Raises:
        ConfigError: the objective does not train it.
    """
    name, declared = config.plugins.network, declaration_of(objective)
    if name and not _trains(declared.network, name):
        raise ConfigError(
            f"--network {name}: the objective {objective} trains a {declared.network.upper()}: leave "
            "out this flag, or those of that network"
        )
    name = name or declared.network
    flags = NETWORKS.flags_of(name, config.extensions)
    network: Network = declared.network_with_head(NETWORKS.get(name, flags)())
    if network.name != name:
        raise ConfigError(f"the network {name}: its class has another name: write name = {name!r}")
    return network


def _trains(trained: str, name: str) -> bool:
    """Whether an objective of the network `trained` can train the one of this name, too."""
    return NETWORKS.is_own(name) or trained in (name, NETWORKS.get_class(name).in_place_of)


def is_chosen_by_flag(name: str) -> bool:
    """Whether --network chooses the network of this name, which no objective names."""
    return NETWORKS.is_own(name) or bool(name in NETWORKS and NETWORKS.get_class(name).in_place_of)


def require_own_part(network: Network, spec: ModelSpec) -> None:
    """Refuse additional fields of a plugin's network if checkpoints could not be read with them.

    Raises:
        ConfigError: the class of `spec.own` is not `network.part`, or it has a field that all
            networks have.
    """
    if type(spec.own) is not (network.part or type(None)):
        raise ConfigError(
            f"the network {network.name}: spec() puts a {type(spec.own).__name__} into `own`, and "
            f"`part` is {network.part and network.part.__name__}: let `part` be that class"
        )
    taken = {*names_of(network.part or type(spec))} & {*flat(replace(spec, own=None))}
    if network.part and taken:
        raise ConfigError(
            f"the network {network.name}: every network has {', '.join(sorted(taken))}: give the "
            f"fields of {network.part.__name__} other names"
        )


def with_network(config: Config, spec: ModelSpec) -> Config:
    """Return `config` with the network of a checkpoint, if no objective names it."""
    if not is_chosen_by_flag(spec.architecture):
        return config
    return replace(config, plugins=replace(config.plugins, network=spec.architecture))
