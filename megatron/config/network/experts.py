"""Mixture of experts (MoE): flags, the layers that have experts, routing, and checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megatron.config.network.layer_pattern import is_of_layers, pattern_of
from megatron.config.optimization.optimizer import OptimizerConfig, plan_optimizer
from megatron.config.parallelism.deepspeed_json import value_at
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts (MoE)."""

    num_experts: list[int] | None = None
    """Experts per layer that has them: one number for all such layers, or one for each. A layer
    with 1 has an ordinary MLP."""

    expert_interval: int | None = None
    """Every N-th layer is an MoE layer (default: 2, unless --moe-layer-freq is given)."""

    moe_layer_freq: str | None = None
    """Which layers have experts, as in Megatron-LM: N for the first layer and every Nth
    after it, or a list with a 1 or 0 for each layer, such as [0]*1+[1]*11."""

    topk: Annotated[int, Spelling("--topk", ("--moe-router-topk",))] = 1
    """Experts that a token passes through."""

    mlp_type: Literal["standard", "residual"] = "standard"
    """With residual, every token passes through an ordinary MLP too, and a learned weight mixes
    the two."""

    moe_expert_parallel_size: Annotated[
        int, Spelling("--moe-expert-parallel-size", ("--expert-model-parallel-size",))
    ] = 1
    """Expert-parallel size: replicas that share the experts of a layer, each keeping its part."""

    moe_train_capacity_factor: float | None = None
    """Capacity of an expert in training, relative to an even share of the tokens (default: 1). Tokens
    over the capacity skip the experts on the residual stream."""

    moe_eval_capacity_factor: float | None = None
    """The same in evaluation."""

    moe_expert_capacity_factor: float | None = None
    """Both of these at once."""

    moe_min_capacity: int = 4
    """Least capacity of an expert, in tokens."""

    moe_token_dropping: Annotated[bool, Spelling("--disable-moe-token-dropping")] = True
    """Drop the tokens over an expert's capacity."""

    moe_loss_coeff: Annotated[float, Spelling("--moe-loss-coeff", ("--moe-aux-loss-coeff",))] = 0.1
    """Weight of the load-balancing (auxiliary) loss."""

    moe_top2_2nd_expert_sampling: Annotated[
        bool, Spelling("--disable-moe-top2-2nd-expert-sampling")
    ] = True
    """Draw the second of two experts by its weight in training, instead of taking the best."""

    noisy_gate_policy: Literal["None", "Jitter", "RSample"] = "None"
    """Noise of the router in training: Jitter multiplies its input by up to 1%, RSample
    draws the one expert by its weight."""


def experts_of_layers(experts: ExpertConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of experts of each layer, 1 for an ordinary MLP; () where all are.

    Raises:
        ValueError: --moe-layer-freq or the length of --num-experts does not fit the layers.
    """
    if experts.num_experts is None:
        return ()
    moe_layers = _moe_layers(experts, num_layers)
    counts = experts.num_experts
    if max(counts) > 1 and not any(moe_layers):
        raise ValueError(
            f"--num-experts: none of the {num_layers} layers would have experts; write "
            "--expert-interval 1"
        )
    if len(counts) == 1:
        counts = counts * sum(moe_layers)
    if len(counts) != sum(moe_layers):
        raise ValueError(
            f"--num-experts has {len(counts)} numbers, but {sum(moe_layers)} of {num_layers} layers have "
            "experts: give one number for all, or one for each of these"
        )
    left = iter(counts)
    numbers = tuple(next(left) if has_experts else 1 for has_experts in moe_layers)
    return numbers if max(numbers) > 1 else ()


def _moe_layers(experts: ExpertConfig, num_layers: int) -> list[bool]:
    """Return a boolean for each layer: whether it is an MoE layer."""
    if experts.moe_layer_freq is None:
        interval = experts.expert_interval or 2
        return [number % interval == 0 for number in range(1, num_layers + 1)]
    given = experts.moe_layer_freq
    pattern = pattern_of(given)
    if isinstance(pattern, int) and pattern > 0:
        return [layer % pattern == 0 for layer in range(num_layers)]
    if not is_of_layers(pattern, num_layers):
        raise ValueError(
            f"--moe-layer-freq {given} is neither a number of at least 1 nor a list of {num_layers} times "
            "0 or 1, such as [0]*1+[1]*3"
        )
    return [bool(each) for each in pattern]


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """MoE routing, resolved. The experts themselves are a part of ModelSpec."""

    train_capacity: float  # tokens per expert, relative to an even share
    eval_capacity: float  # likewise
    min_capacity: int  # tokens
    drops_tokens: bool
    samples_second: bool  # of two experts
    noise: str  # none, jitter or rsample
    loss_coefficient: float


def plan_experts(experts: ExpertConfig) -> ExpertPlan:
    """Return the decided routing."""
    both = experts.moe_expert_capacity_factor or 1.0
    return ExpertPlan(
        train_capacity=experts.moe_train_capacity_factor or both,
        eval_capacity=experts.moe_eval_capacity_factor or both,
        min_capacity=experts.moe_min_capacity,
        drops_tokens=experts.moe_token_dropping,
        samples_second=experts.moe_top2_2nd_expert_sampling,
        noise=experts.noisy_gate_policy.lower(),
        loss_coefficient=experts.moe_loss_coeff,
    )


def expert_problems(
    experts: ExpertConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    user: Mapping[str, Any],
    *,
    num_layers: int,
    has_biases: bool,
    dtype: str,
    zero_stage: int,
    data: int,
    tokens: int,
) -> Iterator[str]:
    """Yield what does not fit together, and what DeepSpeed refuses or gets wrong.

    Args:
        user: DeepSpeed's JSON.
        has_biases: whether the MLPs have any.
        data: number of replicas.
        tokens: the fewest that a replica sees at once.
    """
    wrong = [*_number_problems(experts)]
    try:
        counts = {*experts_of_layers(experts, num_layers)} - {1}
    except ValueError as error:
        wrong.append(str(error))
    if wrong:
        yield from wrong
        return
    if not counts:
        if experts.moe_expert_parallel_size > 1:
            yield (
                f"--moe-expert-parallel-size {experts.moe_expert_parallel_size} needs layers with "
                "experts: give --num-experts (and --expert-interval 1 for experts in every layer)"
            )
        return
    yield from _routing_problems(experts, min(counts), tokens=tokens)
    yield from _layout_problems(experts, parallel, sorted(counts), data=data)
    yield from _zero_problems(user, zero_stage)
    if (
        dtype == "bf16"
        and zero_stage == 1
        and parallel.tensor_model_parallel_size > 1
        and has_biases
    ):
        yield (
            "experts in bf16 at ZeRO stage 1 over tensor-parallel ranks: DeepSpeed would count the "
            "experts' biases several times in the gradient's norm; write --zero-stage 2, or "
            "--disable-bias-linear"
        )
    if plan_optimizer(optimizer, on_cpu=False).name == "muon":
        yield "--optimizer muon does not know experts: write --optimizer adam"
    if optimizer.bitfit and not has_biases and zero_stage:
        yield "--bitfit with --disable-bias-linear leaves nothing of the experts to train"


def _number_problems(experts: ExpertConfig) -> Iterator[str]:
    for flag, number in (
        *(("--num-experts", count) for count in experts.num_experts or ()),
        ("--expert-interval", experts.expert_interval),
        ("--topk", experts.topk),
        ("--moe-expert-parallel-size", experts.moe_expert_parallel_size),
        ("--moe-min-capacity", experts.moe_min_capacity),
    ):
        if number is not None and number < 1:
            yield f"{flag} {number} must be at least 1"
    for flag, factor in (
        ("--moe-train-capacity-factor", experts.moe_train_capacity_factor),
        ("--moe-eval-capacity-factor", experts.moe_eval_capacity_factor),
        ("--moe-expert-capacity-factor", experts.moe_expert_capacity_factor),
    ):
        if factor is not None and factor <= 0:
            yield (
                f"{flag} {factor} must be more than 0; --disable-moe-token-dropping takes the limit away"
            )
        if factor is not None and not experts.moe_token_dropping:
            yield f"{flag} has no meaning with --disable-moe-token-dropping: leave one of them out"
    one_by_one = (experts.moe_train_capacity_factor, experts.moe_eval_capacity_factor)
    if experts.moe_expert_capacity_factor is not None and one_by_one != (None, None):
        yield (
            "--moe-expert-capacity-factor is that of training and evaluation at once: leave it out, "
            "or the others"
        )
    if experts.moe_loss_coeff < 0:
        yield f"--moe-loss-coeff {experts.moe_loss_coeff} must be at least 0"
    if experts.expert_interval is not None and experts.moe_layer_freq is not None:
        yield "--expert-interval and --moe-layer-freq both set which layers have experts: leave one out"


def _routing_problems(experts: ExpertConfig, fewest: int, *, tokens: int) -> Iterator[str]:
    if experts.topk > fewest:
        yield f"--topk {experts.topk} is more than the {fewest} experts of a layer"
    if experts.topk == 1 and experts.moe_min_capacity > tokens:
        yield (
            f"--moe-min-capacity {experts.moe_min_capacity} is more than the {tokens} tokens of a "
            "micro-batch: lower it"
        )
    if experts.noisy_gate_policy == "RSample" and experts.topk > 1:
        yield (
            f"--noisy-gate-policy RSample draws one expert, and --topk is {experts.topk}: write "
            "Jitter, or --topk 1"
        )


def _layout_problems(
    experts: ExpertConfig, parallel: ParallelConfig, counts: list[int], *, data: int
) -> Iterator[str]:
    size = experts.moe_expert_parallel_size
    for count in counts:
        if count % size:
            yield f"--num-experts {count} is not a multiple of --moe-expert-parallel-size {size}"
    if data % size:
        yield (
            f"--moe-expert-parallel-size {size} does not divide the {data} replicas: experts are "
            "shared by groups of that size"
        )
    if parallel.pipeline_model_parallel_size > 1:
        yield (
            "experts do not work in a pipeline: DeepSpeed would save each stage in one piece, and no other "
            "layout could open them; write --pipeline-model-parallel-size 1, and divide the layers "
            "with --tensor-model-parallel-size or the experts with --moe-expert-parallel-size"
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1:
        yield (
            "experts do not work with --sequence-parallel: DeepSpeed's router expects every token on "
            "every tensor-parallel rank; leave the flag out"
        )
    if parallel.ds_sequence_parallel_size > 1:
        yield (
            "experts do not work with --ds-sequence-parallel-size "
            f"{parallel.ds_sequence_parallel_size}: complete replicas share them; write 1"
        )


def _zero_problems(user: Mapping[str, Any], stage: int) -> Iterator[str]:
    """Yield what DeepSpeed's own assertions would stop, and what it would get wrong."""
    if stage == 3:
        yield "ZeRO stage 3 does not divide DeepSpeed's experts: write --zero-stage 2"
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
