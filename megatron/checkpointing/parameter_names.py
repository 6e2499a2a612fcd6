"""Names of a network's parameters in checkpoints, and the module names that they stand for.

In checkpoints of ours a name starts with the layer's number in the pipeline, or with
`tied_modules.embed` for an embedding that is the output layer too. Module names do not depend on
either; they follow Megatron-LM's checkpoints of version 3, and relative positions follow its core.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron.common.registry import NETWORKS, OwnFlags
from megatron.config.architecture.architecture import Architecture, Stacks
from megatron.config.network.model_spec import ModelSpec

TABLES = ("word_embeddings.", "position_embeddings.", "tokentype_embeddings.")
"""Beginnings of the names of an embedding's weights, inside its layer."""

SHARED_POSITIONS = "shared_positions."
"""Beginning of the name of the positions that encoder and decoder share."""

_EMBEDDING = 1
"""Number of the embedding in the list of layers."""

_TIED = "tied_modules.embed"
_TIED_POSITIONS = "tied_modules.positions"


def is_of_vocabulary(name: str) -> bool:
    """Whether a parameter has one row for each token, padding of the vocabulary included."""
    return name.endswith(("word_embeddings.weight", ".output_bias"))


def is_of_experts(name: str) -> bool:
    """Whether the rows of a parameter are experts, which expert-parallel ranks divide."""
    return ".experts." in name


def is_buffer(name: str) -> bool:
    """Whether a tensor of a checkpoint is no parameter: biases of routers, which have no gradient."""
    return name.endswith(".router.expert_bias")


def expert_file(replica: int, rank: int) -> str:
    """Return the name of the file with the experts of one rank that the first replica does not have.

    Args:
        replica: of the rank; the experts of the first one are in DeepSpeed's files.
        rank: among the ranks of a replica.
    """
    return f"experts_{replica:02d}_mp_rank_{rank:02d}_model_states.pt"


@dataclass(frozen=True, kw_only=True)
class ParameterNames(Stacks):
    """Parameter names of a network in checkpoints, and its module names.

    Module names are embedding.word_embeddings.weight, layers.0.mlp.dense_4h_to_h.weight,
    final_layernorm.weight, output_layer.weight of an untied embedding, or classification_head; of
    encoders also pooler.dense, lm_head and binary_head, and in encoder-decoder networks decoder.layers,
    decoder.final_layernorm and lm_head.bias; with multi-token prediction mtp.layers.0.eh_proj.weight.
    """

    architecture: str = "gpt"
    own_flags: OwnFlags = ()  # of a plugin's network

    @classmethod
    def of(cls, spec: ModelSpec) -> "ParameterNames":
        """Return the names of a network."""
        stacks = vars(Stacks.of_spec(spec))
        return cls(**stacks, architecture=spec.architecture, own_flags=spec.own_flags)

    def module(self, name: str) -> str:
        """Translate a parameter name such as 3.mlp.dense_4h_to_h.weight; keep any other name."""
        return _translate(name, self._modules)

    def parameter(self, module: str) -> str:
        """Invert `module`."""
        return _translate(module, self._parameters)

    def of_layer(self, number: int, name: str) -> str:
        """Return the name of a parameter, given its layer's number and its name in that layer.

        A weight that layers share has the name of its tie.
        """
        if name.startswith(SHARED_POSITIONS):
            return f"{_TIED_POSITIONS}.{name}"
        is_embedding = number == _EMBEDDING and name.startswith(TABLES)
        return f"{_TIED if self.tied and is_embedding else number}.{name}"

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        return dict(self._prefixes())

    @cached_property
    def _parameters(self) -> Mapping[str, str]:
        return {module: name for name, module in self._prefixes()}

    def _prefixes(self) -> Iterator[tuple[str, str]]:
        """Yield pairs of prefixes, or of full names, of parameters and modules."""
        network: Architecture = NETWORKS.get(self.architecture, self.own_flags)()
        return network.prefixes(self)


def _translate(name: str, prefixes: Mapping[str, str]) -> str:
    """Replace the longest beginning of `name` that is in `prefixes` and ends with a dot, or all of it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        head = ".".join(parts[:count]) + ("." if count < len(parts) else "")
        if head in prefixes:
            return prefixes[head] + name[len(head) :]
    return name
