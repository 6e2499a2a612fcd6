"""T5 in Megatron-LM's files."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from megatron.checkpointing.megatron_lm.distributed_files import Weight
from megatron.checkpointing.megatron_lm.networks import (
    OF_LAYERS,
    Form,
    Renamed,
    first_decoder_stage,
)
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.parsing.files import Values
from megatron.extensions.t5.flags import DecoderSpec

_CROSS_ATTENTION = re.compile(r"\.(inter|cross)_attention\.(query|key_value|dense|linear_)")


class T5Form(Form):
    """T5's two stacks."""

    renamed: ClassVar[Renamed] = ((r"^(encoder|transformer)\.", ""),)
    distributed: ClassVar[Renamed] = (
        (r"^(layers|final_layernorm)\.", r"encoder.\1."),
        (r"^(decoder\..*)\.post_attention_layernorm\.", r"\1.pre_cross_attn_layernorm."),
        (r"\.post_inter_attention_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
        (r"\.inter_attention\.query\.", ".cross_attention.linear_q."),
        (r"\.inter_attention\.key_value\.", ".cross_attention.linear_kv."),
        (r"\.inter_attention\.dense\.", ".cross_attention.linear_proj."),
        *OF_LAYERS,
        (r"^lm_head\.bias$", "output_layer.bias"),
    )
    expresses = names_of(DecoderSpec)

    def recognises(self, names: Collection[str]) -> bool:
        """Whether there is cross-attention of a decoder."""
        return any(_CROSS_ATTENTION.search(name) for name in names)

    def values(
        self, modules: Mapping[str, Sequence[Weight]], layers: int, arguments: Mapping[str, Any]
    ) -> Values:
        """Return the settings of the decoder."""
        length = arguments.get("decoder_seq_length") or arguments.get("seq_length")
        is_relative = arguments.get("position_embedding_type") == "relative"
        distances = ("relative_attention_num_buckets", "relative_attention_max_distance")
        return {
            "decoder_num_layers": layers,
            "decoder_seq_length": length or None,
            **{name: arguments.get(name) or None for name in distances if is_relative},
        }

    def distributed_names(self, module: str, spec: ModelSpec) -> list[str]:
        """Return the name; positions and the bias of the logits are stored twice."""
        (name,) = super().distributed_names(module, spec)
        second = {
            "embedding.position_embeddings.weight": ["position_embeddings.weight"],
            "output_layer.bias": ["lm_head.output_layer.bias"],
        }
        return [name, *second.get(name, ())]

    def arguments(self, spec: ModelSpec, pipeline: int) -> dict[str, Any]:
        """Return the arguments of the decoder."""
        decoder = spec.part(DecoderSpec)
        return {
            "encoder_num_layers": spec.num_layers,
            "decoder_num_layers": decoder.num_decoder_layers,
            "encoder_seq_length": spec.seq_length,
            "decoder_seq_length": decoder.decoder_seq_length,
            "pipeline_model_parallel_split_rank": first_decoder_stage(spec, pipeline) or None,
        }
