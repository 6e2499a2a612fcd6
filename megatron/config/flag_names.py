"""Which flag a field of the plan comes from, so that messages name flags."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.config.config import all_sections
from megatron.config.parsing.flags import options_of

_SWITCHED_OFF = {
    "model.binary_head": "--bert-no-binary-head",
    "model.linear_bias": "--disable-bias-linear",
    "model.rope_truncation": "--no-rope-truncation",
    "model.final_norm": "--retro-no-final-norm",
    "model.query_key_layer_scaling": "--no-query-key-layer-scaling",
    "model.tied_embeddings": "--untie-embeddings-and-output-weights",
}
"""Decisions that are true unless a switch is given."""

_NAMED = {
    "model.head_dim": "--kv-channels",
    "model.num_decoder_layers": "--decoder-num-layers",
    "model.relative_buckets": "--relative-attention-num-buckets",
    "model.relative_max_distance": "--relative-attention-max-distance",
    "model.padded_vocab_size": "--pad-vocab-size-to",
    "model.position_embedding": "--position-embedding-type",
    "model.rotary_interpolation": "--rotary-seq-len-interpolation-factor",
    "model.rope_scaling": "--rope-scaling-factor",
    "model.query_scalar": "--query-pre-attn-scalar",
    "model.architecture": "--objective",
    "model.num_outputs": "--task",
    "model.num_choices": "--task",
    "model.head_layers": "--head-layers",
    "model.first_token_head": "--task",
    "model.attention": "--attention-impl",
    "model.retro_layers": "--retro-add-retriever",
    "model.retro_retrieved_length": "--retro-num-retrieved-chunks",
    "model.attention_softcap": "--attn-logit-softcapping",
    "model.logit_softcap": "--final-logit-softcapping",
    "model.layernorm_1p": "--apply-layernorm-1p",
    "model.residual_after_norm": "--apply-residual-connection-post-layernorm",
    "model.qkv_bias": "--add-qkv-bias",
    "model.full_attention_layers": "--window-attn-skip-freq",
    "model.scaled_embedding": "--scale-embedding",
    "model.attention_bias_apart": "--attention-bias",
    "model.rope_rule": "--rope-scaling-type",
    "model.rope_original_length": "--rope-original-max-position-embeddings",
    "model.fp32_residual": "--fp32-residual-connection",
    "model.init_std": "--init-method-std",
    "model.experts_per_token": "--topk",
    "model.expert_ffn_hidden_size": "--moe-ffn-hidden-size",
    "model.shared_expert_ffn_hidden_size": "--moe-shared-expert-intermediate-size",
    "model.shared_expert_gate": "--moe-shared-expert-gate",
    "model.router_score": "--moe-router-score-function",
    "model.router_scale": "--moe-router-topk-scaling-factor",
    "model.router_bias": "--moe-router-enable-expert-bias",
    "model.router_groups": "--moe-router-num-groups",
    "model.router_groups_per_token": "--moe-router-group-topk",
    "parallel.tensor": "--tensor-model-parallel-size",
    "parallel.pipeline": "--pipeline-model-parallel-size",
    "parallel.sequence": "--ds-sequence-parallel-size",
    "parallel.partition_method": "--pp-partition-method",
    "parallel.expert": "--moe-expert-parallel-size",
    "parallel.split_rank": "--pipeline-model-parallel-split-rank",
    "parallel.chunks": "--num-virtual-stages-per-pipeline-rank",
    "parallel.splits_backward": "--enable-zbh1-pipeline",
    "optimizer.name": "--optimizer",
    "optimizer.biases_only": "--bitfit",
    "optimizer.weight_decay_style": "--weight-decay-incr-style",
    "optimizer.eps": "--adam-eps",
    "optimizer.momentum": "--sgd-momentum",
    "data.blend_surplus": "--mid-level-dataset-surplus",
    "training.train_iters": "--train-iters",
    "training.exit_after_minutes": "--exit-duration-in-mins",
    "training.exits_on_signal": "--exit-signal-handler",
    "training.kill_switch": "--kill-switch-path",
    "training.skips": "--skip-train-iteration-range",
    "training.deterministic": "--deterministic-mode",
    "schedule.warmup": "--lr-warmup-samples",
    "schedule.decay": "--lr-decay-samples",
    "schedule.style": "--lr-decay-style",
    "schedule.init": "--lr-warmup-init",
    "schedule.peak": "--lr",
    "schedule.floor": "--min-lr",
    "schedule.anneal_style": "--lr-wsd-decay-style",
    "masks.reset_positions": "--reset-position-ids",
    "masks.isolate_documents": "--reset-attention-mask",
    "masks.mask_loss": "--eod-mask-loss",
    "evaluation.interval": "--eval-interval",
    "evaluation.iters": "--eval-iters",
    "kernels.attention": "--attention-impl",
    "plugins.modules": "--plugin",
    "plugins.hooks": "--hook",
    "plugins.metrics": "--metric",
    "kernels.softmax_in_fp32": "--attention-softmax-in-fp32",
}
"""Decisions that have the value of one flag, under another name."""

_NO_FLAG = (
    "model.vocab_size",
    "model.num_experts",
    "training.max_nan_steps",
)
"""Decisions that are more than the flag of their name."""


_IN_TOKENS = {
    "schedule.warmup": "--lr-warmup-tokens",
    "schedule.decay": "--lr-decay-tokens",
}
"""Decisions that another flag has where the learning rate counts tokens."""


def flag_and_value(field: str, value: Any, *, in_tokens: bool = False) -> tuple[str, Any]:
    """Return the flag that a decision comes from, or that would decide so, and its value there.

    Where no single flag has the value, that is the field itself.

    Args:
        field: section and name in a Plan, such as "model.head_dim".
        value: its value, as it comes back from JSON; None where there is none.
        in_tokens: whether the learning-rate schedule counts tokens, not samples.
    """
    if flag := _SWITCHED_OFF.get(field):
        return flag, None if value is None else _said(not value)
    name = field.partition(".")[2]
    options = {} if field in _NO_FLAG else _options()
    flag = (in_tokens and _IN_TOKENS.get(field)) or _NAMED.get(field) or options.get(name)
    if flag is None:
        return field, value
    return flag, _said(value) if isinstance(value, bool) else value


def _said(switch: bool) -> str:
    return "given" if switch else "left out"


def _options() -> Mapping[str, str]:
    """Return the option of each field of the config, except of switches that turn it off."""
    sections = all_sections()
    on = {f.name for section in sections.values() for f in fields(section) if f.default is True}
    return {name: option for name, option in options_of(sections).items() if name not in on}
