"""BERT: an encoder with a masked-LM head and a head for the order of segments."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from megatron.common.registry import NETWORKS
from megatron.config.architecture.architecture import Entry, bias_entry, logits_entry
from megatron.config.architecture.counts import Weights, dense_weights, norm_width, stack_flops
from megatron.config.architecture.options import (
    COMMON,
    EMBEDDING,
    ROTARY,
    STREAM,
)
from megatron.config.config import Config
from megatron.config.network.experts import MoESpec
from megatron.config.network.lora import LoraSpec
from megatron.config.network.model_problems import encoder_problems
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.network_contract import Network
from megatron.config.parallelism.recompute_plan import RecomputePlan
from megatron.extensions.bert.flags import BertSpec
from megatron.extensions.masked_lm.flags import MaskedLMConfig


@NETWORKS.register("bert")
class BertNetwork(Network):
    """An encoder, whose tokens see all tokens of their sample."""

    name = "bert"
    is_causal = False
    masks_padding = True
    takes_heads = True
    service = "masks"
    served_in = "megatron.extensions.bert.routes.masked_lm_backend"
    use = "tools/fill_mask.py fills masks and scores sentences with it"
    usage = 'fill masks with: tools/fill_mask.py --load {directory} --text "TEXT with [MASK]"'
    part = BertSpec
    options = (COMMON | ROTARY | EMBEDDING | STREAM).union(
        *map(names_of, (LoraSpec, MoESpec, BertSpec))
    )
    lacks = "is for decoders; BERT's tokens see all tokens of their sample: leave it out"
    layers_in = "megatron.extensions.bert.layers.bert_layers"
    megatron_in = "megatron.extensions.bert.checkpoints.BERTForm"
    unlike: ClassVar[Mapping[str, str]] = {
        "bert": "BertModel, and all classes with it, has its norms after the sublayers (post-LN), and "
        "a network here before them (pre-LN), as MegatronBertModel: no weights are the same in both"
    }

    def problems(self, config: Config) -> Iterator[str]:
        """Yield the flags of decoders."""
        return encoder_problems(config.model, config.masks, self.lacks)

    def spec(self, plain: ModelSpec, config: Config) -> ModelSpec:
        """Return an encoder, with the binary head unless a flag leaves it out."""
        has_order = config.section(MaskedLMConfig).bert_binary_head
        bert = BertSpec(
            num_token_types=2 if has_order else 0,
            binary_head=has_order,
            head_activation="gelu_tanh" if config.model.openai_gelu else "gelu_erf",
        )
        return replace(plain, architecture=self.name, own=bert)

    def without_head(self, spec: ModelSpec) -> ModelSpec:
        """Return the network without the binary head."""
        return replace(spec, own=replace(spec.part(BertSpec), binary_head=False))

    def embedding(self, spec: ModelSpec, *, tensor: int) -> Entry:
        """Return the embedding, with the table of segments."""
        plain = super().embedding(spec, tensor=tensor)
        rows = Weights(spec.part(BertSpec).num_token_types * spec.hidden_size)
        return replace(plain, weights=plain.weights + rows)

    def head(self, spec: ModelSpec, *, tensor: int) -> list[Entry]:
        """Return the masked-LM head, with pooler and binary head if there are."""
        dense = dense_weights(spec)
        order = dense + 2 * spec.hidden_size + 2 if spec.part(BertSpec).binary_head else 0
        features = Weights(dense + norm_width(spec, spec.hidden_size) + order)
        return [
            Entry(name="BertHeadPipe", kind="features", weights=features),
            logits_entry("MaskedLMLogitsPipe", spec, tensor=tensor),
            bias_entry("MaskedLMBiasPipe", spec, tensor=tensor),
        ]

    def flops(self, spec: ModelSpec, recompute: RecomputePlan) -> float:
        """Return floating-point operations of forward and backward on one sample."""
        head = (spec.vocabulary.padded_vocab_size + spec.hidden_size) * spec.hidden_size
        return float(2 * spec.seq_length * (stack_flops(spec, recompute) + 3 * head))

    def head_prefixes(self, first: int) -> Iterator[tuple[str, str]]:
        """Yield the name prefixes of the heads' parameters and modules."""
        yield f"{first}.dense.", "lm_head.dense."
        yield f"{first}.layernorm.", "lm_head.layernorm."
        yield f"{first}.pooler.", "pooler.dense."
        yield f"{first}.binary_head.", "binary_head."
        yield f"{first}.classification_head.", "classification_head."
        yield f"{first + 1}.word_embeddings.", "output_layer."
        yield f"{first + 2}.output_bias", "lm_head.bias"
