"""Find the architecture of transformers for a network, or for a config.json."""

from megatron.checkpointing.hugging_face.families.bloom import BLOOM
from megatron.checkpointing.hugging_face.families.family import Family, HuggingFaceConfig
from megatron.checkpointing.hugging_face.families.gemma import GEMMA, GEMMA2, GEMMA3
from megatron.checkpointing.hugging_face.families.gpt2 import GPT2
from megatron.checkpointing.hugging_face.families.gpt_neox import GPT_NEOX
from megatron.checkpointing.hugging_face.families.gpt_oss import GPT_OSS
from megatron.checkpointing.hugging_face.families.latent import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
)
from megatron.checkpointing.hugging_face.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from megatron.checkpointing.hugging_face.families.llama_kin import (
    ERNIE,
    GRANITE,
    PHI3,
    SEED_OSS,
    SMOLLM3,
)
from megatron.checkpointing.hugging_face.families.minicpm import MINICPM3
from megatron.checkpointing.hugging_face.families.mixtures import (
    DOTS1,
    GLM4_MOE,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
from megatron.checkpointing.hugging_face.families.nemotron import NEMOTRON
from megatron.checkpointing.hugging_face.families.olmo import OLMO2, OLMO3
from megatron.common.errors import CheckpointError, ConfigError
from megatron.common.registry import FAMILIES, NETWORKS
from megatron.config.architecture.architecture import network_named, network_of
from megatron.config.network.model_spec import ModelSpec

DECODERS = (
    *(GPT2, BLOOM, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, GPT_NEOX),
    *(SEED_OSS, PHI3, SMOLLM3, OLMO2, OLMO3, NEMOTRON),
)
"""Without experts, and with a class for sequence classification in transformers."""


@FAMILIES.register("decoders")
def decoders() -> tuple[Family, ...]:
    """Return the architectures of GPTs."""
    mixtures = (MIXTRAL, QWEN2_MOE, QWEN3_MOE, DOTS1, GLM4_MOE, GPT_OSS)
    return (*mixtures, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MINICPM3, *DECODERS, ERNIE, GRANITE)


def all_families() -> list[Family]:
    """Return this package's families, then the plugins': in order of preference."""
    names = sorted(FAMILIES.with_extensions(), key=FAMILIES.is_own)
    return [family for name in names for family in FAMILIES.get(name)()]


_NOT_COMPARED = (
    *("rope_theta", "rope_scaling", "rope_parameters", "rotary_pct", "rotary_emb_base"),
    *("hidden_act", "hidden_activation", "activation_function"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout"),
    "residual_dropout",
    *("use_sliding_window", "sliding_window", "max_window_layers", "seq_length", "n_ctx"),
    *("id2label", "label2id", "decoder_sparse_step", "mlp_only_layers"),
    *("partial_rotary_factor", "num_nextn_predict_layers", "original_max_position_embeddings"),
)
"""Keys whose values may differ in form; the translation to flags handles or refuses them."""


def family_of(spec: ModelSpec, wanted: str | None = None) -> Family:
    """Return the architecture that expresses `spec`.

    Args:
        wanted: the only one to look at, by its model_type; None for any.

    Raises:
        ConfigError: none has this model_type.
        CheckpointError: there is none; lists the mismatches with the nearest one.
    """
    network = network_of(spec)
    families = all_families()
    if network.not_in_transformers or network.name not in {each.network_name for each in families}:
        reason = network.not_in_transformers or f"transformers has no {network.name}"
        raise CheckpointError(
            f"{reason}: no weights are exported for it; --exporter safetensors writes them by their "
            "names here"
        )
    candidates = [
        family
        for family in families
        if wanted == family.model_type or (not wanted and family.network_name == network.name)
    ]
    if not candidates:
        raise ConfigError(f"--model-type {wanted}: known are {_model_types()}")
    unfit = {family: [*family.problems(spec)] for family in candidates}
    nearest = min(candidates, key=lambda family: len(unfit[family]))
    if not unfit[nearest]:
        return nearest
    which = "--model-type is" if wanted else "the nearest is"
    raise CheckpointError(
        f"no exported architecture expresses this network ({which} {nearest.architecture}):\n"
        + "\n".join(f"  {reason}" for reason in unfit[nearest])
    )


def family_of_config(config: HuggingFaceConfig) -> Family:
    """Return the architecture of config.json.

    Raises:
        CheckpointError: it is none that is known here.
    """
    named, model_type = config.get("architectures") or (), config.get("model_type")
    families = all_families()
    fitting = [each for each in families if each.model_type == model_type]
    for family in sorted(fitting, key=lambda each: each.architecture not in named):
        return family
    for name in NETWORKS.with_extensions():
        if reason := network_named(name).unlike.get(str(model_type)):
            raise CheckpointError(f"config.json: {reason}")
    raise CheckpointError(f"config.json: model_type is {model_type!r}; known are {_model_types()}")


def _model_types() -> str:
    return ", ".join(dict.fromkeys(family.model_type for family in all_families()))


def require_same_network(family: Family, config: HuggingFaceConfig, spec: ModelSpec) -> None:
    """Refuse a config.json with options that `spec` does not express.

    Raises:
        CheckpointError: lists the options that `spec` does not express.
    """
    problems = [*family.problems(spec)]
    for name, ours in {} if problems else family.config(spec).items():
        theirs = config.get(name)
        if name not in _NOT_COMPARED and theirs is not None and theirs != ours:
            problems.append(f"{name} is {theirs}, and a network here has {ours}")
    if problems:
        raise CheckpointError("\n".join(f"config.json: {problem}" for problem in problems))
