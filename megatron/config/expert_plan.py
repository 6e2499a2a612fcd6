"""How tokens find their experts, and what experts do not go together with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.config import Config
from megatron.config.network.expert_layers import experts_of_layers
from megatron.config.network.experts import ExpertConfig
from megatron.config.optimization.optimizer_plan import plan_optimizer
from megatron.config.parallelism.ds_config import value_at
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.precision_plan import plan_precision
from megatron.config.parallelism.zero_plan import ZeroPlan


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """How tokens are routed. The experts themselves are a part of the network's spec."""

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
    config: Config, user: Mapping[str, Any], *, data: int, tokens: int, zero: ZeroPlan
) -> Iterator[str]:
    """Yield what does not fit together, and what DeepSpeed refuses or gets wrong.

    Args:
        user: DeepSpeed's JSON.
        data: number of replicas.
        tokens: the fewest that a replica sees at once.
    """
    experts = config.experts
    wrong = [*_number_problems(experts)]
    try:
        counts = {*experts_of_layers(experts, config.model.num_layers)} - {1}
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
    yield from _layout_problems(experts, config.parallel, sorted(counts), data=data)
    yield from _engine_problems(config, user, zero)


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
        yield "--expert-interval and --moe-layer-freq both say which layers have experts: leave one out"


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
            "shared by whole groups of them"
        )
    if parallel.pipeline_model_parallel_size > 1:
        yield (
            "experts do not work in a pipeline: DeepSpeed would save its stages whole, and no other "
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
            f"{parallel.ds_sequence_parallel_size}: whole replicas share them; write 1"
        )


def _engine_problems(config: Config, user: Mapping[str, Any], zero: ZeroPlan) -> Iterator[str]:
    """Yield what DeepSpeed's own assertions would stop, and what it would get wrong."""
    has_biases, divides = (
        config.model.add_bias_linear,
        config.parallel.tensor_model_parallel_size > 1,
    )
    if zero.stage == 3:
        yield "ZeRO stage 3 does not divide DeepSpeed's experts: write --zero-stage 2"
    for key, least in (("reduce_scatter", 1), ("contiguous_gradients", 2)):
        said = value_at(user, f"zero_optimization.{key}")
        if said is False and zero.stage >= least:
            yield (
                f"zero_optimization.{key} of the JSON is false, and experts at ZeRO stage {zero.stage} "
                "need it: take the key out"
            )
    if value_at(user, "use_data_before_expert_parallelism"):
        yield (
            "use_data_before_expert_parallelism of the JSON: neighbouring replicas share experts "
            "here; take the key out"
        )
    if (
        plan_precision(config.precision).dtype == "bf16"
        and zero.stage == 1
        and divides
        and has_biases
    ):
        yield (
            "experts in bf16 at ZeRO stage 1 over tensor-parallel ranks: DeepSpeed would count the "
            "experts' biases several times in the gradient's norm; write --zero-stage 2, or "
            "--disable-bias-linear"
        )
    if plan_optimizer(config.optimizer, on_cpu=False).name == "muon":
        yield "--optimizer muon does not know experts: write --optimizer adam"
    if config.optimizer.bitfit and not has_biases and zero.stage:
        yield "--bitfit with --disable-bias-linear leaves nothing of the experts to train"
