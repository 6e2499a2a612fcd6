"""Retro: a GPT that attends to retrieved neighbors."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.common.registry import NETWORKS
from megatron.config.architecture.architecture import Entry
from megatron.config.architecture.counts import (
    Weights,
    attention_matrices,
    attention_weights,
    block_weights,
    key_matrices,
    mlp_matrices,
    norm_width,
)
from megatron.config.architecture.options import COMMON, EMBEDDING, ROTARY
from megatron.config.config import Config
from megatron.config.network.lora import LoraSpec
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.network_contract import Network
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.extensions.retro.flags import (
    RetroConfig,
    RetroSpec,
    retro_flag_problems,
    retro_problems,
    with_retriever,
)


@NETWORKS.register("retro")
class RetroNetwork(Network):
    """A decoder, some layers of which attend to encoded neighbors of each chunk."""

    name = "retro"
    retrieves = True
    extends = "gpt"
    service = "neighbors"
    use = "tools/retro/text_generation/retro_text_generation.py answers questions with it"
    usage = "evaluate with: {script} --skip-train --use-checkpoint-args --load {directory} ..."
    part = RetroSpec
    options = COMMON | ROTARY | EMBEDDING | {*names_of(LoraSpec), *names_of(RetroSpec)}
    lacks = "is not built for networks with retrieval: leave it out"
    layers_in = "megatron.extensions.retro.layers.retro_layers"
    batch_in = "megatron.extensions.retro.layers.retro_batch"
    caches = True
    megatron_in = "megatron.extensions.retro.checkpoints.RetroForm"
    added_options = (
        *("retro_layers", "retro_encoder_layers", "retro_chunk_length"),
        *("retro_retrieved_length", "retro_normed_residual"),
    )
    not_in_transformers = "transformers has no Retro"

    def problems(self, config: Config) -> Iterator[str]:
        """Yield why a network with retrieval cannot be built."""
        retro = config.section(RetroConfig)
        return retro_problems(retro, config.model, config.masks, config.parallel, self.lacks)

    @classmethod
    def misplaced_flags(cls, config: Config) -> Iterator[str]:
        """Yield the flags of retrieval."""
        return retro_flag_problems(config.section(RetroConfig))

    def spec(self, plain: ModelSpec, config: Config) -> ModelSpec:
        """Return a GPT with chunked cross-attention to neighbors."""
        return with_retriever(
            super().spec(plain, config), config.section(RetroConfig), config.model
        )

    def num_contexts(self, spec: ModelSpec) -> int:
        """Return the number of neighbors of a prompt."""
        return spec.part(RetroSpec).retro_num_neighbors

    def body(self, spec: ModelSpec, *, tensor: int, expert: int) -> list[Entry]:
        """Return the entries of a GPT, some of them replaced."""
        *others, norm = super().body(spec, tensor=tensor, expert=expert)
        has_norm = spec.part(RetroSpec).final_norm
        return [*others, norm if has_norm else Entry(name="no_final_norm", kind="norm")]

    def embedding(self, spec: ModelSpec, *, tensor: int) -> Entry:
        """Return the embedding of tokens and neighbors."""
        return replace(super().embedding(spec, tensor=tensor), name="RetroEmbeddingPipe")

    def block(self, spec: ModelSpec, number: int, *, tensor: int, expert: int) -> Entry:
        """Return the layer `number`, of which the first with retrieval has the encoder of neighbors."""
        plain = super().block(spec, number, tensor=tensor, expert=expert)
        retro = spec.part(RetroSpec)
        if number not in retro.retro_layers:
            return plain
        cross = attention_weights(spec, tensor) + norm_width(spec, spec.hidden_size)
        if number == retro.retro_layers[0]:
            layer = block_weights(replace(spec, moe=None), number, tensor=tensor)
            cross = 2 * cross + retro.retro_encoder_layers * layer.total
        name = "ParallelTransformerRetroLayerPipe"
        return replace(plain, name=name, weights=plain.weights + Weights(cross))

    def kept_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that an entry keeps, including retrieval's."""
        retro, kept = sizes.spec.part(RetroSpec), super().kept_bytes(entry, sizes)
        if entry.number not in retro.retro_layers:
            return kept
        neighbors = _neighbor_activations(sizes)
        kept += sizes.norm() + sizes.attention() + sizes.keys_beyond(neighbors.tokens)
        if entry.number != retro.retro_layers[0]:
            return kept
        layers = retro.retro_encoder_layers * neighbors.layer(1)
        return int(kept + layers + neighbors.norm() + neighbors.attention() + neighbors.stream)

    def deferred_bytes(self, entry: Entry, sizes: Any) -> int:
        """Return the bytes that the weight gradients of a layer are computed from."""
        retro, kept = sizes.spec.part(RetroSpec), super().deferred_bytes(entry, sizes)
        if entry.number not in retro.retro_layers:
            return kept
        neighbors = _neighbor_activations(sizes)
        kept += sizes.attention_products(neighbors)
        first = entry.number == retro.retro_layers[0]
        return int(kept + (retro.retro_encoder_layers * neighbors.products(1) if first else 0))

    def flops(self, spec: ModelSpec, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample."""
        return super().flops(spec, recompute) + self._retrieval_flops(spec, recompute)

    def _retrieval_flops(self, spec: ModelSpec, recompute: RecomputePlan) -> float:
        retro = spec.part(RetroSpec)
        if not retro.retro_layers:
            return 0.0
        r, s, m = retro.retro_retrieved_length, spec.seq_length, retro.retro_chunk_length
        tokens = s // m * retro.retro_num_neighbors * r  # of neighbors
        heads, keys = spec.attention.query_features, key_matrices(spec)
        attention = attention_matrices(spec)
        queries = attention - keys
        visible = retro.retro_num_neighbors * r
        cross = s * queries + tokens * keys + 2 * heads * s * visible
        layer = attention + mlp_matrices(spec) + 2 * heads * r
        encoder = retro.retro_encoder_layers * tokens * layer
        encoder += tokens * queries + s * keys + 2 * heads * tokens * m
        forward = len(retro.retro_layers) * cross + encoder
        return 2 * (3 + recompute.share) * forward


def _neighbor_activations(sizes: Any) -> Any:
    """Return the activations of a GPT whose samples are retrieved neighbors."""
    spec, retro = sizes.spec, sizes.spec.part(RetroSpec)
    each = spec.seq_length // retro.retro_chunk_length * retro.retro_num_neighbors
    model = replace(spec, seq_length=retro.retro_retrieved_length, own=None)
    return sizes.of(model, samples=each)
