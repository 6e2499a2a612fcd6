"""What code outside of its layers needs to know of a network, given its spec; see `network_contract.py`.

Imports no flags, so that a network can be built and run without the command line. Its layers are in
`megatron/model/`, what runs them in `megatron/inference/`: both are named here and imported when they
are needed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron.common.errors import ConfigError
from megatron.common.registry import HEADS, NETWORKS, import_dotted
from megatron.config.architecture.counts import (
    Branches,
    Weights,
    block_weights,
    embedding_weights,
    norm_weights,
    stack_flops,
    table_weights,
    visible_keys,
)
from megatron.config.architecture.options import DECODER
from megatron.config.architecture.prediction import prediction_flops, prediction_weights
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.config.network.prediction import PredictionSpec
from megatron.config.network.spec_part import LINEAR_LAYERS
from megatron.config.parallelism.recompute_plan import RecomputePlan

Kind = Literal[
    "",
    "embedding",
    "positions",
    "block",
    "norm",
    "prediction",
    "features",
    "logits",
    "bias",
    "task",
]
"""What an entry of the list of layers is: nothing with weights, embedding, positions of a stack, layer,
norm after the layers, the same with layers that predict later tokens, layers before the logits, logits,
bias of these, or head of a task."""

Service = Literal["", "prompts", "neighbors", "masks", "texts"]
"""What a network does with a request: nothing, continue prompts, continue prompts with neighbors, fill
masks, or make text from text."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the list of layers, as pipelines and estimates see it.

    Args:
        name: of its class or function, which --pp-partition-method matches.
        weights: of one rank.
        row: weights for each token of the vocabulary.
        tie: entries of one stage with the same tie share their weights; "": none.
        number: of a block, from 1 on; of an embedding before further blocks, the number of the first of them.
        depths: of multi-token prediction, each as much work as a block.
        frozen: those of the weights that are not trained; see `megatron.planner.frozen`.
    """

    name: str
    kind: Kind = ""
    weights: Weights = Weights()
    row: int = 0
    tie: str = ""
    number: int = 0
    depths: int = 0
    frozen: Weights = Weights()


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """What the names of a network's parameters depend on.

    Args:
        num_layers: of the encoder, or of the only stack.
        tied: whether later layers have the embedding's table too, such as the output layer.
        num_decoder_layers: of the decoder in an encoder-decoder network.
        num_predictions: layers of multi-token prediction with weights of their own.
    """

    num_layers: int
    tied: bool = True
    num_decoder_layers: int = 0
    num_predictions: int = 0

    @staticmethod
    def of_spec(spec: ModelSpec) -> "Stacks":
        """Return the stacks of a network."""
        return Stacks(
            num_layers=spec.num_layers,
            tied=spec.shares_embedding,
            num_decoder_layers=flat(spec)["num_decoder_layers"],
            num_predictions=spec.part(PredictionSpec).num_layers,
        )


class Architecture:
    """A network of one stack: a GPT, unless a subclass says otherwise."""

    name: str = ""
    """Name under which it is registered: in specs, and in capitals in messages."""

    is_causal: bool = True
    """Whether attention is causal, so that the network can continue a text."""

    masks_padding: bool = False
    """Whether each batch limits what tokens see to the real ones."""

    retrieves: bool = False
    """Whether it reads neighbors of its samples."""

    in_place_of: str = ""
    """The network whose objectives train this one too, with --network; a plugin's needs none."""

    takes_heads: bool = False
    """Whether another head can replace the network's; see `classifier`."""

    extends: str = ""
    """The network whose checkpoints it can start from, with initial values for its further weights."""

    service: Service = ""
    """What it does with a request."""

    served_in: str = ""
    """Dotted name of the function that loads it for the server, called with the ModelSource and the
    GenerationConfig, a `megatron.inference.server.backend.Backend`; "": it continues prompts, if at all."""

    use: str = "nothing here generates with it"
    """A sentence for who tries to use it otherwise: the tool for it."""

    usage: str = ""
    """A line with a command for the checkpoint in {directory}, trained by {script}; "": none."""

    part: type | None = None
    """Dataclass of what only its specs have; its defaults stand for its absence. See `ModelSpec.part`."""

    layers_in: str = ""
    """Dotted name of the function of its layers; see `layers`."""

    batch_in: str = "megatron.model.gpt.gpt_batch"
    """Dotted name of the function of its batch in generation; see `batch`."""

    caches: bool = False
    """Whether its layers keep what they need of earlier tokens, by the contract of
    `megatron.model.layers.parts`; else generation recomputes the sequence for each new token."""

    not_in_transformers: str = ""
    """Why no architecture of transformers is this network; "" where one may be."""

    unlike: ClassVar[Mapping[str, str]] = {}
    """Models of transformers that are taken for this network and are another, by model_type: why."""

    added_options: tuple[str, ...] = ()
    """Fields that decide which weights it has in addition to the network that it extends."""

    options: frozenset[str] = DECODER
    """Fields of ModelSpec that its layers read; another that is given is refused."""

    lacks: str = "has no effect in this network: leave it out"
    """End of the message about an option that it does not have."""

    megatron_in: str = ""
    """Dotted name of its form in Megatron-LM's files; "": it has none."""

    # Its list of layers.

    def layers(self, spec: ModelSpec, parts: Any) -> list[Any]:
        """Return the network as a list of layers that are not built yet: see megatron.model.layers.

        Raises:
            ConfigError: a plugin's network has none.
        """
        if not self.layers_in:
            raise ConfigError(f"the network {self.name} has no layers: define layers(spec, parts)")
        layers: list[Any] = import_dotted(self.layers_in)(spec, parts)
        return layers

    def batch(self, spec: ModelSpec, tokens: Any) -> Any:
        """Return the input of the first layer in a pass of generation.

        Args:
            tokens: a `megatron.model.layers.layer_input.PassInput`.
        """
        return import_dotted(self.batch_in)(spec, tokens)

    def num_contexts(self, spec: ModelSpec) -> int:
        """Return the number of texts that a sequence attends to in addition to its own in generation."""
        return 0

    def max_length(self, spec: ModelSpec) -> int | None:
        """Return the most tokens of a sequence in generation; None for no limit."""
        positions = spec.positions
        if positions.rope_short_factors and spec.seq_length <= positions.rope_original_length:
            # Longer sequences have other angles, also of the keys that are cached.
            return min(positions.max_position_embeddings, positions.rope_original_length)
        return positions.max_position_embeddings

    def entries(self, spec: ModelSpec, *, tensor: int = 1, expert: int = 1) -> list[Entry]:
        """Return what `layers` returns, with the weights of one rank.

        The last entry is left out that casts the logits of 16-bit networks.

        Args:
            tensor: tensor-parallel ranks.
            expert: replicas that share the experts of a layer.
        """
        body = self.body(spec, tensor=tensor, expert=expert)
        return [Entry(name="take_tokens"), *body, *self.head(spec, tensor=tensor)]

    def body(self, spec: ModelSpec, *, tensor: int, expert: int) -> list[Entry]:
        """Return the entries from the embedding to the final norm."""
        numbers = range(1, spec.num_layers + 1)
        return [
            self.embedding(spec, tensor=tensor),
            Entry(name="to_sequence_first"),
            *(self.block(spec, number, tensor=tensor, expert=expert) for number in numbers),
            *self.final_norm(spec, tensor=tensor, expert=expert),
        ]

    def final_norm(self, spec: ModelSpec, *, tensor: int, expert: int) -> list[Entry]:
        """Return the entries between the last layer and the head."""
        norm = norm_weights(spec)
        if spec.prediction is None:
            return [
                Entry(name="to_batch_first"),
                Entry(name=spec.norm.normalization, kind="norm", weights=norm),
            ]
        return [
            Entry(
                name="OutputTable",
                weights=Weights(table_weights(spec, tensor=tensor)),
                row=spec.hidden_size,
                tie="embed",
            ),
            Entry(
                name="MultiTokenPrediction",
                kind="prediction",
                weights=norm + prediction_weights(spec, tensor=tensor, expert=expert),
                number=spec.num_layers + 1,
                depths=spec.prediction.prediction_depths,
            ),
        ]

    def embedding(self, spec: ModelSpec, *, tensor: int) -> Entry:
        """Return the embedding."""
        return Entry(
            name="EmbeddingPipe",
            kind="embedding",
            weights=embedding_weights(spec, tensor=tensor),
            row=spec.hidden_size,
            tie="embed" if spec.shares_embedding else "",
        )

    def block(self, spec: ModelSpec, number: int, *, tensor: int, expert: int) -> Entry:
        """Return the layer `number`, from 1 on."""
        return Entry(
            name="ParallelTransformerLayerPipe",
            kind="block",
            weights=block_weights(spec, number, tensor=tensor, expert=expert),
            number=number,
        )

    def head(self, spec: ModelSpec, *, tensor: int) -> list[Entry]:
        """Return the entries after the final norm."""
        return [logits_entry("OutputEmbeddingPipe", spec, tensor=tensor)]

    def branches(self, spec: ModelSpec, number: int) -> Branches:
        """Return the residual branches of the layer `number`, from 1 on; depths of prediction follow."""
        return Branches()

    def linear_layers(self, spec: ModelSpec, number: int) -> Sequence[str]:
        """Return the linear layers of the layer `number`, from 1 on, which may get adapters."""
        return LINEAR_LAYERS

    def attended_pairs(self, spec: ModelSpec) -> int:
        """Return the pairs of a query and a key in all layers for one sample, masked ones too."""
        depths = spec.part(PredictionSpec).prediction_depths
        return spec.seq_length * sum(
            self.branches(spec, number).attention * visible_keys(spec, number)
            for number in range(1, spec.num_layers + depths + 1)
        )

    def flops(self, spec: ModelSpec, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample: see `stack_flops`."""
        head = spec.vocabulary.padded_vocab_size * spec.hidden_size
        ahead = prediction_flops(spec, recompute)
        return float(2 * spec.seq_length * (stack_flops(spec, recompute) + ahead + 3 * head))

    def residual_additions(self, spec: ModelSpec) -> int:
        """Return how often a layer's output is added to the residual stream: see `initialise`."""
        numbers = range(1, spec.num_layers + 1)
        return sum(self.branches(spec, number).total for number in numbers)

    def division_problems(self, spec: ModelSpec, *, tensor: int) -> Iterator[str]:
        """Yield the flags of this network's own layers whose sizes `tensor` ranks cannot divide."""
        return iter(())

    # Its activations. `sizes`: a `megatron.planner.activations.Activations` of its micro-batches.

    def kept_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that an entry keeps for backward when nothing is recomputed."""
        parts = {"embedding": sizes.embedding, "norm": sizes.norm, "features": sizes.features}
        if entry.kind == "block":
            return int(sizes.layer(entry.number))
        if entry.kind == "prediction":
            return int(sizes.norm() + entry.depths * sizes.prediction(entry.number))
        return int(parts[entry.kind]()) if entry.kind in parts else 0

    def deferred_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that the weight gradients of a layer are computed from."""
        return int(sizes.products(entry.number))

    def kept_masks(self, numbers: Sequence[int], sizes: Any) -> int:
        """Return the bytes of the attention masks that the layers `numbers` share."""
        spec = sizes.spec
        attending = [number for number in numbers if self.branches(spec, number).attention]
        return int(sizes.masks(attending))

    def kept_logits(self, sizes: Any, tokens: int) -> int:
        """Return the bytes of the logits of `tokens`."""
        return int(sizes.vocabulary_logits(tokens))

    def scored_spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the network with the samples whose logits are computed."""
        return spec

    def rows(self, spec: ModelSpec) -> int:
        """Return the sequences of a sample."""
        return 1

    def num_logits(self, spec: ModelSpec) -> int:
        """Return the columns of the logits that are no padding."""
        return spec.vocabulary.vocab_size

    def predicts(self, spec: ModelSpec) -> str:
        """Return the meaning of the greatest logit; "" where only the values matter."""
        return "token"

    def with_labels(self, spec: ModelSpec, labels: tuple[str, ...]) -> ModelSpec:
        """Return the network with the names of the classes that its head predicts, if it has one."""
        return spec

    def scores_tokens(self, spec: ModelSpec) -> bool:
        """Whether there are logits of each token, rather than of each sequence."""
        return True

    def prefixes(self, stacks: Stacks) -> Iterator[tuple[str, str]]:
        """Yield pairs of parameter names and module names, each a prefix or a full name.

        See `megatron.checkpointing.parameter_names`.
        """
        behind = FIRST_LAYER + stacks.num_layers
        yield f"{'tied_modules.embed' if stacks.tied else '1'}.", "embedding."
        for number in range(stacks.num_layers):
            yield f"{FIRST_LAYER + number}.", f"layers.{number}."
        final = f"{behind + 1}." + ("final_layernorm." if stacks.num_predictions else "")
        yield final, "final_layernorm."
        for depth in range(stacks.num_predictions):
            yield f"{behind + 1}.layers.{depth}.", f"mtp.layers.{depth}."
        yield from self.head_prefixes(behind + 2)

    def head_prefixes(self, first: int) -> Iterator[tuple[str, str]]:
        """Yield the prefixes of the entries after the final norm, which are numbered from `first` on."""
        yield f"{first}.word_embeddings.", "output_layer."
        yield f"{first}.classification_head.", "classification_head."

    # Variants.

    def classifier(self) -> "Architecture":
        """Return this network with the head of a downstream task instead of its output head.

        Raises:
            ConfigError: it learns none.
        """
        if not self.takes_heads:
            raise ConfigError(f"no downstream task is learned by a {self.name.upper()}")
        network: Architecture = HEADS.get("classes")(self)
        return network


FIRST_LAYER = 3
"""Number of the first transformer layer in the list of layers of one stack."""


def network_of(spec: ModelSpec) -> Architecture:
    """Return the `Architecture` of a spec."""
    network: Architecture = spec.network
    return network


def network_named(name: str) -> type[Architecture]:
    """Return the class of a network, for what does not depend on its flags."""
    found: type[Architecture] = NETWORKS.get_class(name)
    return found


def logits_entry(name: str, spec: ModelSpec, *, tensor: int) -> Entry:
    """Return the entry of the logits, whose table may be the embedding's."""
    return Entry(
        name=name,
        kind="logits",
        weights=Weights(table_weights(spec, tensor=tensor)),
        row=spec.hidden_size,
        tie="embed" if spec.vocabulary.tied_embeddings else "",
    )


def bias_entry(name: str, spec: ModelSpec, *, tensor: int) -> Entry:
    """Return the entry of a bias of the logits."""
    return Entry(
        name=name, kind="bias", weights=Weights(spec.vocabulary.padded_vocab_size // tensor), row=1
    )
