"""MegatronBert: BERT with norms before sublayers (pre-LN); heads of pretraining. BERT in Megatron-LM's files."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from megatron.checkpointing.expressed import Allowed
from megatron.checkpointing.hugging_face.families.family import (
    Family,
    HuggingFaceConfig,
    Modules,
    activation_name,
    activation_values,
)
from megatron.checkpointing.hugging_face.families.tensor_mapping import QueriesKeysValues
from megatron.checkpointing.megatron_lm.distributed_files import Weight
from megatron.checkpointing.megatron_lm.networks import OF_LAYERS, Form, Renamed
from megatron.common.registry import FAMILIES
from megatron.config.network.model_spec import ModelSpec, names_of
from megatron.config.parsing.files import Values
from megatron.extensions.bert.flags import BertSpec


def encoder_values(config: HuggingFaceConfig) -> Values:
    """Return the settings of positions and activation."""
    activation = activation_values(config["hidden_act"], gated=False)
    head_values = {"openai_gelu": activation == {"gelu": "tanh"}}
    return {"position_embedding_type": "learned_absolute", **activation, **head_values}


def encoder_needs(_: ModelSpec) -> Allowed:
    """Return the values of fields that a BERT has."""
    return {
        "architecture": ("bert",),
        "num_token_types": None,
        "binary_head": (True,),
        "head_activation": None,  # see `computes`
        "activation": ("gelu_tanh", "gelu_erf"),
    }


def _one_activation(spec: ModelSpec) -> ModelSpec:
    """Return the network with the activation of the MLP before the logits too."""
    activation: Any = "gelu_erf" if spec.mlp.activation == "gelu_erf" else "gelu_tanh"
    return replace(spec, own=replace(spec.part(BertSpec), head_activation=activation))


def _qkv(spec: ModelSpec) -> QueriesKeysValues:
    return QueriesKeysValues(
        groups=spec.attention.num_attention_heads, queries=1, head_dim=spec.attention.head_dim
    )


ENCODER = {
    "embedding.word_embeddings": "bert.embeddings.word_embeddings",
    "embedding.position_embeddings": "bert.embeddings.position_embeddings",
    "embedding.tokentype_embeddings": "bert.embeddings.token_type_embeddings",
    "final_layernorm": "bert.encoder.ln",
}
POOLER = {"pooler.dense": "bert.pooler.dense"}

MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    auto_class="AutoModelForPreTraining",
    keys={
        "num_hidden_layers": "num_layers",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "type_vocab_size": lambda spec: spec.part(BertSpec).num_token_types,
        "hidden_act": activation_name,
        # The default of transformers is 1e-12.
        "layer_norm_eps": "norm_epsilon",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_dropout_prob": "hidden_dropout",
        "position_embedding_type": lambda _: "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    },
    values_of=encoder_values,
    needs=encoder_needs,
    network={
        **ENCODER,
        **POOLER,
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.layernorm": "cls.predictions.transform.LayerNorm",
        "binary_head": "cls.seq_relationship",
        "output_layer": "cls.predictions.decoder",
        "lm_head": "cls.predictions",
    },
    layer={
        "input_layernorm": "attention.ln",
        "self_attention.query_key_value": Modules(
            ("attention.self.query", "attention.self.key", "attention.self.value"), _qkv
        ),
        "self_attention.dense": "attention.output.dense",
        "post_attention_layernorm": "ln",
        "mlp.dense_h_to_4h": "intermediate.dense",
        "mlp.dense_4h_to_h": "output.dense",
    },
    layers="bert.encoder.layer.{}.",
    objective="bert",
    computes=_one_activation,
)


_PARTS = (
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertForMaskedLM",
        auto_class="AutoModelForMaskedLM",
        absent=("pooler.dense", "binary_head"),
    ),
    replace(
        MEGATRON_BERT,
        architecture="MegatronBertModel",
        auto_class="AutoModel",
        absent=("lm_head.dense", "lm_head.layernorm", "lm_head", "output_layer", "binary_head"),
    ),
)
"""Classes with a part of the heads of pretraining, to be read."""


@FAMILIES.register("berts")
def berts() -> tuple[Family, ...]:
    """Return the architectures with heads of pretraining."""
    return (MEGATRON_BERT, *_PARTS)


class BERTForm(Form):
    """BERT's heads."""

    distributed: ClassVar[Renamed] = (
        (r"^(layers|final_layernorm)\.", r"encoder.\1."),
        *OF_LAYERS,
        (r"^lm_head\.layernorm\.", "lm_head.layer_norm."),
        (r"^lm_head\.bias$", "output_layer.bias"),
    )
    expresses = names_of(BertSpec)

    def recognises(self, names: Collection[str]) -> bool:
        """Whether there is a masked-LM head, or the head of a task."""
        return any(name.startswith(("lm_head.dense.", "classification_head.")) for name in names)

    def values(
        self, modules: Mapping[str, Sequence[Weight]], layers: int, arguments: Mapping[str, Any]
    ) -> Values:
        """Return the settings of the heads."""
        heads = ("binary_head.", "classification_head.")
        return {
            "bert_binary_head": any(name.startswith(heads) for name in modules),
            "openai_gelu": bool(arguments.get("openai_gelu")),
        }

    def arguments(self, spec: ModelSpec, pipeline: int) -> dict[str, Any]:
        """Return the arguments of the heads."""
        bert = spec.part(BertSpec)
        return {
            "bert_binary_head": bert.binary_head,
            "openai_gelu": bert.head_activation == "gelu_tanh",
        }
