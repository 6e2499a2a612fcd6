"""Mixture of experts (MoE): checks of the flags, the layout and DeepSpeed's JSON."""

from collections.abc import Iterator

from megatron.config.checks.start import Start
from megatron.config.config import Config
from megatron.config.network.experts import (
    ExpertConfig,
    balancing_of,
    drops_tokens,
    experts_of_layers,
    experts_per_token,
)
from megatron.config.network.model_resolution import ffn_hidden_size_of
from megatron.config.parallelism.layout import padded_length, sequence_size, uses_ring
from megatron.config.parsing.declaration import range_problems
from megatron.config.parsing.json_tree import value_at


def expert_problems(start: Start) -> Iterator[str]:
    """Yield what does not fit together, and what DeepSpeed refuses or gets wrong."""
    experts = start.config.experts
    num_layers = start.config.model.num_layers
    if wrong := [*_layer_problems(experts, num_layers)]:
        yield from wrong
        return
    counts = {*experts_of_layers(experts, num_layers)} - {1}
    if not counts:
        if experts.moe_expert_parallel_size > 1:
            yield (
                f"--moe-expert-parallel-size {experts.moe_expert_parallel_size} needs layers with "
                "experts: give --num-experts (and --expert-interval 1 for experts in every layer)"
            )
        return
    yield from _routing_problems(experts, min(counts))
    yield from _layout_problems(start.config, sorted(counts), data=start.replicas)
    tensor = start.config.parallel.tensor_model_parallel_size
    if experts.moe_expert_parallel_size > 1 or start.config.ranks_per_expert != tensor:
        yield from _divided_problems(start)
    has_biases = start.config.model.add_bias_linear
    if start.config.optimizer.bitfit and not has_biases and start.zero.stage:
        yield "--bitfit with --disable-bias-linear leaves nothing of the experts to train"


def problems_of_flags(experts: ExpertConfig, num_layers: int) -> Iterator[str]:
    """Yield what does not fit together in a network, whatever its layout."""
    if wrong := [*_layer_problems(experts, num_layers)]:
        yield from wrong
    elif counts := {*experts_of_layers(experts, num_layers)} - {1}:
        yield from _routing_problems(experts, min(counts))


def _layer_problems(experts: ExpertConfig, num_layers: int) -> Iterator[str]:
    yield from _number_problems(experts)
    try:
        experts_of_layers(experts, num_layers)
    except ValueError as error:
        yield str(error)


def _number_problems(experts: ExpertConfig) -> Iterator[str]:
    yield from range_problems(experts)
    for flag, factor in (
        ("--moe-train-capacity-factor", experts.moe_train_capacity_factor),
        ("--moe-eval-capacity-factor", experts.moe_eval_capacity_factor),
        ("--moe-expert-capacity-factor", experts.moe_expert_capacity_factor),
    ):
        if factor is not None and not experts.moe_token_dropping:
            yield f"{flag} has no meaning with --disable-moe-token-dropping: leave one of them out"
    one_by_one = (experts.moe_train_capacity_factor, experts.moe_eval_capacity_factor)
    if experts.moe_expert_capacity_factor is not None and one_by_one != (None, None):
        yield (
            "--moe-expert-capacity-factor is that of training and evaluation at once: leave it out, "
            "or the others"
        )
    jitter = experts.moe_input_jitter_eps
    if jitter is not None and experts.noisy_gate_policy != "None":
        yield "--moe-input-jitter-eps and --noisy-gate-policy are both noise of the router: leave one out"
    if experts.expert_interval is not None and experts.moe_layer_freq is not None:
        yield "--expert-interval and --moe-layer-freq both set which layers have experts: leave one out"


def _routing_problems(experts: ExpertConfig, fewest: int) -> Iterator[str]:
    chosen = experts_per_token(experts)
    if chosen > fewest:
        yield f"--topk {chosen} is more than the {fewest} experts of a layer"
    if experts.moe_token_drop_policy and not drops_tokens(experts):
        yield (
            f"--moe-token-drop-policy {experts.moe_token_drop_policy} needs a capacity: give "
            "--moe-expert-capacity-factor, or leave it out"
        )
    if experts.noisy_gate_policy == "RSample" and chosen > 1:
        yield (
            f"--noisy-gate-policy RSample draws one expert, and --topk is {chosen}: write "
            "Jitter, or --topk 1"
        )
    sinkhorn = balancing_of(experts) == "sinkhorn"
    if experts.moe_router_enable_expert_bias and experts.moe_router_score_function != "sigmoid":
        yield (
            "--moe-router-enable-expert-bias needs scores between 0 and 1 of each expert: write "
            "--moe-router-score-function sigmoid"
        )
    if sinkhorn and (experts.moe_router_enable_expert_bias or experts.moe_router_num_groups):
        yield (
            "--moe-router-load-balancing-type sinkhorn chooses experts itself: leave "
            "--moe-router-enable-expert-bias and --moe-router-num-groups out"
        )
    if balancing_of(experts) in ("sinkhorn", "none") and experts.moe_loss_coeff:
        yield (
            f"--moe-router-load-balancing-type {balancing_of(experts)} has no auxiliary loss: leave "
            "--moe-loss-coeff out"
        )
    if experts.moe_shared_expert_gate and not experts.moe_shared_expert_intermediate_size:
        yield "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"
    if experts.mlp_type == "residual" and experts.moe_shared_expert_intermediate_size:
        yield (
            "--mlp-type residual and --moe-shared-expert-intermediate-size both add an MLP for "
            "every token: leave one out"
        )
    yield from _group_problems(experts, fewest)


def _group_problems(experts: ExpertConfig, fewest: int) -> Iterator[str]:
    """Yield problems of expert groups (group-limited routing)."""
    groups, used = experts.moe_router_num_groups, experts.moe_router_group_topk
    best = experts.moe_router_group_best
    if (groups is None) != (used is None):
        yield "--moe-router-num-groups and --moe-router-group-topk go together: give both"
    if groups is None or used is None:
        if best is not None:
            yield f"--moe-router-group-best {best} needs --moe-router-num-groups"
        return
    chosen = experts_per_token(experts)
    if fewest % groups:
        yield f"--moe-router-num-groups {groups} does not divide --num-experts {fewest}"
    elif used > groups or chosen > used * (fewest // groups) or (best is None and chosen % used):
        yield (
            f"--moe-router-group-topk {used} does not fit: it is at most the {groups} groups, divides "
            f"--moe-router-topk {chosen} unless --moe-router-group-best is given, and so many groups "
            "have at least as many experts"
        )
    elif best is not None and best > fewest // groups:
        yield (
            f"--moe-router-group-best {best} is more than the {fewest // groups} experts of a group"
        )


def _layout_problems(config: Config, counts: list[int], *, data: int) -> Iterator[str]:
    experts, parallel = config.experts, config.parallel
    size, per_expert = experts.moe_expert_parallel_size, config.ranks_per_expert
    flag = f"--moe-expert-parallel-size {size}"
    for count in counts:
        if count % size:
            yield f"--num-experts {count} is not a multiple of {flag}"
    flag_of_width = f"--{'moe-' if experts.moe_ffn_hidden_size else ''}ffn-hidden-size"
    width = experts.moe_ffn_hidden_size or ffn_hidden_size_of(config.model)
    is_own = experts.moe_ffn_hidden_size or per_expert != parallel.tensor_model_parallel_size
    if is_own and width % per_expert:
        yield (
            f"{flag_of_width} {width} is not a multiple of the {per_expert} ranks that share "
            "each expert (--expert-tensor-parallel-size, or else --tensor-model-parallel-size)"
        )
    sequence, tensor = sequence_size(parallel), max(1, parallel.tensor_model_parallel_size)
    ranks = data * sequence * tensor
    undivided = (
        ", or --expert-tensor-parallel-size 1" if per_expert > 1 and ranks % size == 0 else ""
    )
    if per_expert != tensor:
        if ranks % (size * per_expert):
            yield (
                f"{flag} * --expert-tensor-parallel-size {per_expert} = {size * per_expert} does not "
                f"divide the {ranks} ranks of a pipeline stage: experts are shared by groups of that "
                f"size; write sizes whose product divides them{undivided}"
            )
    elif data * sequence % size:
        sequence_note = f" of {sequence} ranks that divide a sample" if sequence > 1 else ""
        yield (
            f"{flag} does not divide the {data} replicas{sequence_note}: experts are shared by groups of "
            f"that size; write a size that divides them{undivided}"
        )
    length = config.model.seq_length
    ring = f"--context-parallel-size {parallel.context_parallel_size}"
    if padded_length(parallel, length) > length:
        yield (
            f"experts with {ring}: --seq-length {length} is not a multiple of {2 * sequence}, and "
            "tokens that pad a sample would be routed to them too; write a multiple, or "
            "--cp-comm-type a2a"
        )
    if sequence > 1 and drops_tokens(experts):
        flag = ring if uses_ring(parallel) else f"--ds-sequence-parallel-size {sequence}"
        yield (
            f"experts with {flag} have no capacity, as each rank has a part of the tokens: write "
            "--disable-moe-token-dropping"
        )


def _divided_problems(start: Start) -> Iterator[str]:
    """Yield what DeepSpeed does not do with experts that replicas divide, or would get wrong."""
    user, stage = start.deepspeed, start.zero.stage
    if stage == 3:
        yield (
            "ZeRO stage 3 does not take experts that replicas divide: write --zero-stage 2, or "
            "--moe-expert-parallel-size 1 without --expert-tensor-parallel-size, with which it "
            "partitions them like other weights"
        )
    for key, least in (("reduce_scatter", 1), ("contiguous_gradients", 2)):
        given = value_at(user, f"zero_optimization.{key}")
        if given is False and stage >= least:
            yield (
                f"zero_optimization.{key} of the JSON is false, and experts at ZeRO stage {stage} "
                "need it: take the key out"
            )
    if value_at(user, "use_data_before_expert_parallelism"):
        yield (
            "use_data_before_expert_parallelism of the JSON: neighbouring replicas share experts "
            "here; take the key out"
        )
