"""Mixture of experts (MoE): flags, the layers that have experts, router and routing."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from megatron.config.network.layer_pattern import is_of_layers, pattern_of
from megatron.config.network.spec_part import SpecPart
from megatron.config.parsing.declaration import resolve, setting

_NO_LIMIT = "; --disable-moe-token-dropping takes the limit away"


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Mixture of experts (MoE)."""

    num_experts: list[int] | None = setting(None, at_least=1)
    """Experts per MoE layer: one number for all MoE layers, or one for each. A layer with 1 has an
    ordinary MLP."""

    expert_interval: int | None = setting(None, at_least=1)
    """Every N-th layer is an MoE layer (default: 2, or 1 with a flag of Megatron-LM, unless
    --moe-layer-freq is given)."""

    moe_layer_freq: str | None = None
    """Which layers have experts, as in Megatron-LM: N for the first layer and every Nth
    after it, or a list with a 1 or 0 for each layer, such as [0]*1+[1]*11."""

    topk: int | None = setting(
        None, at_least=1, older=("--moe-router-topk",), plan="model.experts_per_token"
    )
    """Experts that each token is routed to (default: 1; 2 with a flag of Megatron-LM)."""

    moe_ffn_hidden_size: int | None = setting(None, at_least=1, plan="model.expert_ffn_hidden_size")
    """Width of an expert (default: --ffn-hidden-size). Many narrow experts are called fine-grained."""

    moe_shared_expert_intermediate_size: int | None = setting(
        None, at_least=1, plan="model.shared_expert_ffn_hidden_size"
    )
    """Total width of the shared experts: an MLP that every token passes through, in addition to its
    routed experts."""

    moe_shared_expert_gate: bool = setting(False, plan="model.shared_expert_gate")
    """Multiply the output of the shared experts by a sigmoid of a learned product with the token."""

    moe_grouped_gemm: bool = False
    """Use the defaults of Megatron-LM: no capacity, no random choices. Experts are computed in
    grouped products in any case."""

    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] | None = None
    """Use the defaults of Megatron-LM, as --moe-grouped-gemm does. Tokens are exchanged in
    all-to-alls with uneven splits, whatever the type."""

    moe_router_score_function: Literal["softmax", "sigmoid"] | None = setting(
        None, plan="model.router_score"
    )
    """Router scores: a softmax over the experts (default), or a sigmoid of each."""

    moe_router_pre_softmax: bool = False
    """Weigh the chosen experts by their softmax scores among all experts, instead of scaling these to
    a sum of 1. Sigmoid scores are always scaled."""

    moe_router_topk_scaling_factor: float | None = setting(None, above=0, plan="model.router_scale")
    """Factor of the weights of the chosen experts."""

    moe_router_num_groups: int | None = setting(None, at_least=1, plan="model.router_groups")
    """Number of expert groups; each token is routed to --moe-router-group-topk of them."""

    moe_router_group_topk: int | None = setting(
        None, at_least=1, plan="model.router_groups_per_token"
    )
    """Number of expert groups that each token is routed to."""

    moe_router_group_best: int | None = setting(None, at_least=1, plan="model.router_group_best")
    """Experts whose scores, the best of a group, add up to the score of the group: 1 in DeepSeek-V2, 2
    in DeepSeek-V3 (default: --moe-router-topk / --moe-router-group-topk, as in Megatron-LM)."""

    moe_router_enable_expert_bias: bool = setting(False, plan="model.router_bias")
    """Balance without an auxiliary loss: choose experts by their scores plus a bias, which each
    step raises for idle experts and lowers for busy ones. Needs sigmoid scores."""

    moe_router_bias_update_rate: float = setting(1e-3, at_least=0, plan="experts.bias_rate")
    """Step by which the bias of --moe-router-enable-expert-bias changes."""

    moe_router_linear_bias: bool = setting(False, plan="model.router_linear_bias")
    """Add a learned bias to the router's logits, as gpt-oss does (in Megatron-LM: without
    --disable-bias-linear)."""

    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"] | None
    ) = None
    """Auxiliary loss of a micro-batch (default), of each sequence, or of the micro-batches of all
    replicas in a step so far (global_aux_loss); sinkhorn chooses evenly without a loss; none."""

    mlp_type: Literal["standard", "residual"] = "standard"
    """With residual, every token also passes through an ordinary MLP, and a learned weight mixes
    both outputs."""

    moe_expert_parallel_size: int = setting(
        1, at_least=1, older=("--expert-model-parallel-size",), plan="parallel.expert"
    )
    """Expert-parallel size: ranks that share the experts of a layer, each keeping its part. They
    belong to different replicas, or divide a sample, or with --expert-tensor-parallel-size a layer."""

    expert_tensor_parallel_size: int | None = setting(
        None, at_least=1, plan="parallel.expert_tensor"
    )
    """Neighbouring ranks that share each expert, each keeping some of its features (default:
    --tensor-model-parallel-size). With 1, ranks hold undivided experts, and tensor-parallel ranks
    send their tokens to those of other ranks."""

    moe_train_capacity_factor: float | None = setting(None, above=0, remedy=_NO_LIMIT)
    """Capacity of an expert in training, relative to an even share of the tokens (default: 1; no
    limit with a flag of Megatron-LM). Tokens over the capacity skip the experts on the residual
    stream."""

    moe_eval_capacity_factor: float | None = setting(None, above=0, remedy=_NO_LIMIT)
    """Capacity of an expert in evaluation; see --moe-train-capacity-factor."""

    moe_expert_capacity_factor: float | None = setting(None, above=0, remedy=_NO_LIMIT)
    """Sets both --moe-train-capacity-factor and --moe-eval-capacity-factor."""

    moe_min_capacity: int = setting(4, at_least=1, plan="experts.min_capacity")
    """Least capacity of an expert, in tokens."""

    moe_token_dropping: bool = setting(True, flag="--disable-moe-token-dropping")
    """Never drop tokens that exceed an expert's capacity."""

    moe_token_drop_policy: Literal["probs", "position"] | None = None
    """Tokens to drop over the capacity: those with the least weight, or the last ones (default:
    position for two experts per token, probs for more; for one at random in training)."""

    moe_loss_coeff: float | None = setting(None, at_least=0, older=("--moe-aux-loss-coeff",))
    """Weight of the load-balancing (auxiliary) loss (default: 0.1; 0 with a flag of Megatron-LM)."""

    moe_z_loss_coeff: float | None = setting(None, at_least=0, plan="experts.z_loss_coefficient")
    """Weight of the router's z-loss, which keeps its logits small."""

    moe_top2_2nd_expert_sampling: bool = setting(
        True, flag="--disable-moe-top2-2nd-expert-sampling"
    )
    """Route each token to its second-best expert in training, instead of sampling the second of two
    experts by router probability (default: sampled, except with a flag of Megatron-LM)."""

    noisy_gate_policy: Literal["None", "Jitter", "RSample"] = "None"
    """Noise of the router in training: Jitter multiplies its input by up to 1%, RSample
    draws the one expert by its weight."""

    moe_input_jitter_eps: float | None = setting(None, above=0, below=1)
    """Multiply the router's input by 1 plus or minus up to this in training."""


@dataclass(frozen=True, kw_only=True)
class MoESpec(SpecPart):
    """Mixtures of experts in place of MLPs."""

    section: ClassVar[str] = "experts"

    num_experts: tuple[int, ...] = ()  # of each layer, 1 for an ordinary MLP
    experts_per_token: int = 1
    residual_experts: bool = False  # in addition to the experts there is an MLP for every token
    expert_ffn_hidden_size: int = 0  # of an expert; 0: ffn_hidden_size
    shared_expert_ffn_hidden_size: int = 0  # of the experts of every token; 0: there are none
    shared_expert_gate: bool = False  # factor of their output for each token
    router_score: str = "softmax"  # or sigmoid
    router_normalises: bool = False  # weights of the chosen experts to a sum of 1
    router_scale: float = 1.0  # factor of these weights
    router_bias: bool = False  # experts are chosen by their scores plus a bias
    router_groups: int = 0  # of experts, of which a token uses some; 0: there are none
    router_groups_per_token: int = 0
    router_linear_bias: bool = False  # of the products that scores are computed from
    router_group_best: int = 0  # experts of a group whose scores are its own; 0: its share

    @classmethod
    def of(cls, config: Any) -> "MoESpec | None":
        """Return experts, shared experts and router; None without experts: see `SpecPart`."""
        return moe_spec(config.experts, config.model.num_layers)


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """MoE routing in training and evaluation, resolved. The experts themselves are a part of ModelSpec."""

    train_capacity: float  # tokens per expert, relative to an even share
    eval_capacity: float  # likewise
    min_capacity: int  # tokens
    drops_tokens: bool
    drop_policy: str  # probs, position, or random for one expert per token
    samples_second: bool  # of two experts
    samples_first: bool  # of one
    jitter: float  # of the router's input
    balancing: str  # a value of --moe-router-load-balancing-type
    loss_coefficient: float
    z_loss_coefficient: float
    bias_rate: float  # of the bias by which experts are chosen


def is_megatron_lm(experts: ExpertConfig) -> bool:
    """Whether a flag is given that only one of the two systems, Megatron-LM, has."""
    return (
        experts.moe_grouped_gemm
        or experts.moe_token_dispatcher_type is not None
        or experts.moe_router_load_balancing_type is not None
        or experts.moe_router_score_function is not None
        or experts.moe_router_pre_softmax
        or experts.moe_router_num_groups is not None
        or experts.moe_router_enable_expert_bias
    )


def balancing_of(experts: ExpertConfig) -> str:
    """Return the load balancing of experts: a value of --moe-router-load-balancing-type."""
    return experts.moe_router_load_balancing_type or "aux_loss"


def experts_per_token(experts: ExpertConfig) -> int:
    """Experts that a token passes through."""
    default = 2 if is_megatron_lm(experts) else 1
    return default if experts.topk is None else experts.topk


def drops_tokens(experts: ExpertConfig) -> bool:
    """Whether experts have a capacity."""
    factors = (
        experts.moe_train_capacity_factor,
        experts.moe_eval_capacity_factor,
        experts.moe_expert_capacity_factor,
    )
    if not experts.moe_token_dropping:
        return False
    return not is_megatron_lm(experts) or any(factor is not None for factor in factors)


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
        interval = experts.expert_interval or (1 if is_megatron_lm(experts) else 2)
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


def moe_spec(experts: ExpertConfig, num_layers: int) -> MoESpec | None:
    """Return experts, shared experts and router of a network; None without experts."""
    num_experts = experts_of_layers(experts, num_layers)
    if not num_experts:
        return None
    sinkhorn = balancing_of(experts) == "sinkhorn"
    alone = experts_per_token(experts) == 1
    score = experts.moe_router_score_function or ("sigmoid" if sinkhorn and alone else "softmax")
    # One weight alone would be scaled to 1, and the router would not learn. Sigmoid scores know no
    # order of softmax and choice.
    unscaled = (experts.moe_router_pre_softmax and score == "softmax") or alone or sinkhorn
    return resolve(
        MoESpec,
        "model",
        experts,
        num_experts=num_experts,
        experts_per_token=experts_per_token(experts),
        residual_experts=experts.mlp_type == "residual",
        router_score=score,
        router_normalises=not unscaled,
        router_scale=experts.moe_router_topk_scaling_factor or 1.0,
        router_group_best=_group_best(experts),
    )


def _group_best(experts: ExpertConfig) -> int:
    """Return the experts whose scores are the score of a group; 0 for the share of each group."""
    given, groups = experts.moe_router_group_best or 0, experts.moe_router_group_topk or 1
    return 0 if given * groups == experts_per_token(experts) else given


def plan_experts(experts: ExpertConfig) -> ExpertPlan:
    """Return the resolved routing."""
    both = experts.moe_expert_capacity_factor or 1.0
    default = 0.0 if is_megatron_lm(experts) else 0.1
    given = experts.moe_loss_coeff
    has_loss = balancing_of(experts) not in ("sinkhorn", "none")
    jitter = 0.01 if experts.noisy_gate_policy == "Jitter" else 0.0
    policies = {1: "random", 2: "position"}
    return ExpertPlan(
        train_capacity=experts.moe_train_capacity_factor or both,
        eval_capacity=experts.moe_eval_capacity_factor or both,
        min_capacity=experts.moe_min_capacity,
        drops_tokens=drops_tokens(experts),
        drop_policy=experts.moe_token_drop_policy
        or policies.get(experts_per_token(experts), "probs"),
        samples_second=experts.moe_top2_2nd_expert_sampling and not is_megatron_lm(experts),
        samples_first=experts.noisy_gate_policy == "RSample",
        jitter=experts.moe_input_jitter_eps or jitter,
        balancing=balancing_of(experts),
        loss_coefficient=(default if given is None else given) if has_loss else 0.0,
        z_loss_coefficient=experts.moe_z_loss_coeff or 0.0,
        bias_rate=experts.moe_router_bias_update_rate,
    )
