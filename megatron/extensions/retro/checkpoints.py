"""Retro in the files of Megatron core: parameter names, flags, and options core cannot express."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megatron.checkpointing.megatron_lm.distributed_files import Weight
from megatron.checkpointing.megatron_lm.networks import Form, Renamed
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.parsing.files import Values
from megatron.extensions.retro.flags import RetroSpec

_CROSS_ATTENTION = ".cross_attention.attn."
"""Part of the names of chunked cross-attention, which no other network of Megatron-LM has."""

_FIRST_NORM = (
    ".encoder.layers.0.post_attention_layernorm.",
    ".encoder.layers.0.pre_mlp_layernorm.norm.",
)
_RETRIEVAL = (
    (".encoder.layers.", ".cross_attention.encoder.layers."),
    (".inter_attention.query.", ".cross_attention.attn.linear_q."),
    (".inter_attention.key_value.", ".cross_attention.attn.linear_kv."),
    (".inter_attention.dense.", ".cross_attention.attn.linear_proj."),
    (".pre_inter_attention_layernorm.", ".pre_cross_attn_layernorm."),
)
_GPT = (
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
)
"""Parts of module names here and in Megatron core."""

_ARGUMENTS = {
    "retro_num_neighbors": ("retro_num_neighbors",),
    "retro_num_retrieved_chunks": ("retro_num_retrieved_chunks",),
    "retro_chunk_length": ("retro_chunk_length", "retro_gpt_chunk_length"),
    "retro_encoder_hidden_dropout": ("retro_encoder_hidden_dropout",),
    "retro_encoder_attention_dropout": ("retro_encoder_attention_dropout",),
}
"""Names of Megatron-LM's arguments by fields of ours."""


class RetroForm(Form):
    """Retro, in the names of Megatron core, in its layers without Transformer Engine."""

    renamed: ClassVar[Renamed] = (
        (r"^decoder\.", ""),
        (r"\.pre_mlp_layernorm\.norm\.", ".post_attention_layernorm."),
        *((re.escape(core), own) for own, core in _RETRIEVAL),
    )
    """From parameter names of Megatron core to ours, tried before the names that a GPT has too."""

    expresses = names_of(RetroSpec)  # of some fields `problems` allows one value each

    def recognises(self, names: Collection[str]) -> bool:
        """Whether there is chunked cross-attention."""
        return any(_CROSS_ATTENTION in name for name in names)

    def flat_name(self, module: str) -> str:
        """Return the name of a parameter in Megatron core."""
        for name, core in (_FIRST_NORM, *_RETRIEVAL, *_GPT):
            module = module.replace(name, core)
        return re.sub(r"^(layers|final_layernorm)\.", r"decoder.\1.", module)

    def values(
        self, modules: Mapping[str, Sequence[Weight]], layers: int, arguments: Mapping[str, Any]
    ) -> Values:
        """Return the settings of the encoder of neighbors and of its form."""
        encoder_layers = {
            match[1]
            for name in modules
            if (match := re.search(r"\.encoder\.layers\.(\d+)\.", name))
        }
        return {
            "retro_add_retriever": True,
            "retro_normed_residual": True,
            "retro_final_norm": any(name.startswith("final_layernorm.") for name in modules),
            "retro_encoder_layers": len(encoder_layers),
            **{
                field: next(
                    (found for name in names if (found := arguments.get(name)) is not None), None
                )
                for field, names in _ARGUMENTS.items()
            },
        }

    def arguments(self, spec: ModelSpec, pipeline: int) -> dict[str, Any]:
        """Return the arguments of the encoder of neighbors."""
        retro = spec.part(RetroSpec)
        return {
            "retro_add_retriever": True,
            "retro_encoder_layers": retro.retro_encoder_layers,
            "retro_num_retrieved_chunks": retro.retro_retrieved_length // retro.retro_chunk_length,
            **{
                theirs: getattr(retro, field)
                for field, names in _ARGUMENTS.items()
                if hasattr(retro, field)
                for theirs in names
            },
        }

    def problems(self, spec: ModelSpec, *, pipeline: int, flag: str) -> Iterator[str]:
        """Yield why Megatron core cannot load or express a Retro."""
        if pipeline > 1:
            yield f"{flag} {pipeline}: Megatron core runs Retro without pipeline stages; write 1"
        retro = spec.part(RetroSpec)
        for needed, is_met in (
            ("--retro-normed-residual", retro.retro_normed_residual),
            ("--retro-no-final-norm", not retro.final_norm),
            ("--retro-attention-gate 1", retro.retro_attention_gate == 1),
        ):
            if not is_met:
                yield f"Megatron core computes Retro as with {needed}, and this one was trained without it"
