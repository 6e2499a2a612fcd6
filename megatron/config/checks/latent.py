"""Checks of multi-head latent attention: what does not go together with its flags."""

from collections.abc import Iterator

from megatron.common.registry import ATTENTIONS
from megatron.config.checks.start import Start
from megatron.config.network.latent import LatentConfig
from megatron.config.network.lora import lora_targets
from megatron.config.network.model import ModelConfig
from megatron.config.network.model_problems import flag_problems
from megatron.config.network.model_resolution import position_of, stretched
from megatron.config.parsing.declaration import flags_of, range_problems

_SWITCH = "--multi-latent-attention"
_OF_YARN = ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim")
"""Flags that --position-embedding-type yarn has too."""


def latent_problems(start: Start) -> Iterator[str]:
    """Yield the flags that latent attention needs, and those that it does not take."""
    model, kernels, lora = start.config.model, start.config.kernels, start.config.lora
    latent = [flag for flag in flags_of(LatentConfig) if flag.name != "multi_latent_attention"]
    if not model.multi_latent_attention:
        given = {flag.options[0]: getattr(model, flag.name) != flag.default for flag in latent}
        if model.position_embedding_type == "yarn":
            given |= dict.fromkeys(_OF_YARN, False)
        yield from flag_problems(given, f"needs {_SWITCH}")
        return
    yield from range_problems(model, *(flag.name for flag in latent))
    if model.qk_pos_emb_head_dim % 2:
        yield (
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} is odd: rotary positions turn pairs "
            "of features"
        )
    if position_of(model) != "rotary":
        yield f"{_SWITCH} has rotary positions: write --position-embedding-type rope"
    derived = {
        # Megatron-LM's scripts repeat a size in a flag that has no effect there.
        f"--kv-channels {model.kv_channels}": model.kv_channels
        not in (None, model.qk_head_dim, model.v_head_dim),
        "--group-query-attention": model.group_query_attention,
        "--qk-layernorm-across-heads": model.qk_layernorm_across_heads,
        f"--rotary-percent {model.rotary_percent:g}": model.rotary_percent != 1,
        f"--rotary-local-base {model.rotary_local_base}": model.rotary_local_base is not None,
    }
    yield from flag_problems(
        derived,
        f"has no meaning with {_SWITCH}: --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim are "
        "the sizes of heads; leave it out",
    )
    yield from _yarn_problems(model)
    if ATTENTIONS.is_own(kernels.attention_impl):
        yield (
            f"--attention-impl {kernels.attention_impl}: a plugin's attention does not take the latents "
            f"that {_SWITCH} caches: leave it out"
        )
    if lora.lora_rank and "query_key_value" in lora_targets(lora.lora_target_modules):
        yield (
            f"{_SWITCH} has no layer query_key_value: write --lora-target-modules dense "
            "dense_h_to_4h dense_4h_to_h, or some of them"
        )


def _yarn_problems(model: ModelConfig) -> Iterator[str]:
    factor = model.rotary_scaling_factor
    if factor != 1 and (model.rope_type == "rope" or model.use_rope_scaling):
        other = "--use-rope-scaling" if model.use_rope_scaling else "--rope-type rope"
        yield f"--rotary-scaling-factor {factor:g} and {other} contradict each other: give one of them"
    elif model.rope_type == "rope" and model.use_rope_scaling:
        yield "--rope-type rope and --use-rope-scaling contradict each other: give one of them"
    if factor != 1 and model.rope_scaling_factor != ModelConfig.rope_scaling_factor:
        yield (
            f"--rotary-scaling-factor {factor:g} and --rope-scaling-factor {model.rope_scaling_factor:g} "
            "are the same factor: give one of them"
        )
    if model.rope_type == "yarn" and model.use_rope_scaling and model.rope_scaling_type != "yarn":
        yield (
            f"--rope-type yarn and --rope-scaling-type {model.rope_scaling_type} contradict each "
            "other: write --rope-scaling-type yarn"
        )
    if model.mscale != 1 and model.rope_attention_factor:
        yield (
            f"--mscale {model.mscale:g} and --rope-attention-factor {model.rope_attention_factor:g} "
            "both scale the tables: give one of them"
        )
    positions = stretched(model)
    if positions.use_rope_scaling and positions.rope_scaling_type == "yarn":
        return
    scales = {
        f"--mscale {model.mscale:g}": model.mscale != 1,
        f"--mscale-all-dim {model.mscale_all_dim:g}": model.mscale_all_dim not in (0, 1),
    }
    yield from flag_problems(
        scales, "is of YaRN: give --rotary-scaling-factor with it, or leave it out"
    )
