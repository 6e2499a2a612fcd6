"""Which layers have experts, what they count, and what does not go together."""

import json

import pytest
import torch
from networks import gpt_steps
from plain_mixture import PlainMixture
from tiny import tiny_config, tiny_plan, tiny_spec

from megatron.common.errors import ConfigError
from megatron.config.network.experts import experts_of_layers
from megatron.config.plan.samples import fewest_processes
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.rng import OrdinaryStream


def problems(line, *, world_size=1):
    with pytest.raises(ConfigError) as caught:
        tiny_plan(*line.split(), world_size=world_size)
    return caught.value.problems


@pytest.mark.parametrize(
    ("line", "experts"),
    [
        ("", ()),
        ("--num-experts 1", ()),
        ("--num-experts 4", (1, 4, 1, 4, 1, 4)),
        ("--num-experts 4 --expert-interval 1", (4,) * 6),
        ("--num-experts 4 --expert-interval 3", (1, 1, 4, 1, 1, 4)),
        ("--num-experts 4 8 1", (1, 4, 1, 8, 1, 1)),
        ("--num-experts 4 --moe-layer-freq 2", (4, 1, 4, 1, 4, 1)),
        ("--num-experts 4 --moe-layer-freq 4", (4, 1, 1, 1, 4, 1)),
        ("--num-experts 4 --moe-layer-freq [0]*1+[1]*5", (1, 4, 4, 4, 4, 4)),
        ("--num-experts 4 8 --moe-layer-freq ([0]*2+[1])*2", (1, 1, 4, 1, 1, 8)),
    ],
)
def test_layers_that_have_experts(line, experts):
    assert experts_of_layers(tiny_config(*line.split()).experts, 6) == experts


def test_flags_of_both_systems_mean_the_same():
    plans = [
        tiny_plan(*line.split(), world_size=2)
        for line in (
            "--num-experts 4 --topk 2 --moe-expert-parallel-size 2 --moe-loss-coeff 0.01 "
            "--moe-train-capacity-factor 1.5 --moe-eval-capacity-factor 1.5",
            "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
            "--moe-aux-loss-coeff 0.01 --moe-expert-capacity-factor 1.5",
        )
    ]
    assert plans[0] == plans[1]
    assert plans[0].experts.loss_coefficient == 0.01
    core = tiny_plan("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall")
    assert (core.model.moe.num_experts, core.model.moe.experts_per_token) == ((4, 4), 2)
    assert (core.experts.drops_tokens, core.experts.loss_coefficient) == (False, 0.0)
    assert (plans[0].parallel.expert, plans[0].model.moe.experts_per_token) == (2, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-experts 0", "--num-experts 0 must be at least 1"),
        ("--num-experts 4 --topk 5", "--topk 5 is more than the 4 experts of a layer"),
        ("--num-experts 4 8", "--num-experts has 2 numbers, but 1 of 2 layers"),
        ("--num-experts 4 --moe-layer-freq 1+1", "--moe-layer-freq 1+1 is neither"),
        ("--num-experts 4 --moe-layer-freq [1]*3", "list of 2 times"),
        ("--num-experts 4 --moe-layer-freq [1]*99999999", "is neither"),
        ("--num-experts 4 --expert-interval 3", "none of the 2 layers would have experts"),
        ("--num-experts 4 --expert-interval 1 --moe-layer-freq 1", "leave one out"),
        (
            "--num-experts 4 --moe-router-enable-expert-bias",
            "write --moe-router-score-function sigmoid",
        ),
        ("--num-experts 4 --moe-grouped-gemm --moe-token-drop-policy probs", "needs a capacity"),
        ("--num-experts 4 --moe-router-num-groups 2", "go together: give both"),
        ("--num-experts 4 --moe-shared-expert-gate", "needs --moe-shared-expert-intermediate-size"),
        ("--num-experts 4 --moe-train-capacity-factor 0", "must be more than 0"),
        (
            "--num-experts 4 --disable-moe-token-dropping --moe-eval-capacity-factor 2",
            "has no meaning with --disable-moe-token-dropping",
        ),
        (
            "--num-experts 4 --moe-expert-capacity-factor 1 --moe-eval-capacity-factor 2",
            "training and evaluation at once",
        ),
        ("--num-experts 4 --moe-loss-coeff -1", "--moe-loss-coeff -1.0 must be at least 0"),
        ("--num-experts 4 --topk 2 --noisy-gate-policy RSample", "write Jitter, or --topk 1"),
        ("--num-experts 3 --moe-expert-parallel-size 2", "3 is not a multiple of"),
        ("--num-experts 6 --moe-expert-parallel-size 3", "3 does not divide the 2 replicas"),
        (
            "--num-experts 2 --moe-expert-parallel-size 2 --tensor-model-parallel-size 2",
            "write a size that divides them, or --expert-tensor-parallel-size 1",
        ),
        (
            "--num-experts 2 --moe-expert-parallel-size 2 --expert-tensor-parallel-size 2",
            "sizes whose product divides them, or --expert-tensor-parallel-size 1",
        ),
        (
            "--num-experts 3 --expert-model-parallel-size 3 --tensor-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
            "--moe-expert-parallel-size 3 * --expert-tensor-parallel-size 1 = 3 does not divide the 2 "
            "ranks of a pipeline stage",
        ),
        (
            "--num-experts 2 --moe-ffn-hidden-size 9 --tensor-model-parallel-size 2",
            "--moe-ffn-hidden-size 9 is not a multiple of the 2 ranks that share each expert",
        ),
        (
            "--num-experts 2 --ffn-hidden-size 9 --expert-tensor-parallel-size 2",
            "--ffn-hidden-size 9 is not a multiple of the 2 ranks that share each expert",
        ),
        (
            "--num-experts 2 --expert-tensor-parallel-size 2 --zero-stage 3",
            "--moe-expert-parallel-size 1 without --expert-tensor-parallel-size",
        ),
        ("--moe-expert-parallel-size 2", "needs layers with experts: give --num-experts"),
        (
            "--num-experts 4 --moe-expert-parallel-size 2 --zero-stage 3",
            "write --zero-stage 2, or --moe-expert-parallel-size 1",
        ),
        ("--num-experts 4 --bitfit --disable-bias-linear --zero-stage 1", "leaves nothing"),
        ("--num-experts 4 --ds-sequence-parallel-size 2", "no capacity, as each rank has a part"),
        ("--num-experts 4 --context-parallel-size 2", "write a multiple, or --cp-comm-type a2a"),
        (
            "--num-experts 4 --moe-expert-parallel-size 2 --slow-rank-factor 2",
            "as all 2 replicas do at this --moe-expert-parallel-size",
        ),
    ],
)
def test_what_does_not_go_together_is_told(line, message):
    found = problems(line, world_size=2)
    assert any(message in problem for problem in found), found


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"zero_optimization": {"stage": 1, "reduce_scatter": False}}, "reduce_scatter"),
        ({"zero_optimization": {"stage": 2, "contiguous_gradients": False}}, "contiguous"),
        ({"use_data_before_expert_parallelism": True}, "neighbouring replicas"),
    ],
)
def test_what_experts_need_of_the_json_is_told(block, message, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(block))
    found = problems(
        f"--num-experts 4 --moe-expert-parallel-size 2 --deepspeed_config {file}", world_size=2
    )
    assert any(message in problem for problem in found), found


def test_what_fits_is_not_refused():
    for line in (
        "--num-experts 4 --bf16 --tensor-model-parallel-size 2 --zero-stage 2",
        "--num-experts 4 --bf16 --tensor-model-parallel-size 2 --disable-bias-linear",
        "--num-experts 4 --moe-expert-parallel-size 2 --zero-stage 2 --topk 4",
        "--num-experts 4 --noisy-gate-policy RSample --moe-min-capacity 12",
        "--num-experts 4 --slow-rank-factor 2",
        "--num-experts 4 --tensor-model-parallel-size 2 --sequence-parallel",
        "--num-experts 4 --zero-stage 3",
    ):
        assert tiny_plan(*line.split(), world_size=2).model.moe.num_experts == (1, 4)


def test_ranks_that_divide_a_sample_may_divide_experts():
    """Two such ranks hold all of two expert-parallel ranks, so one replica is enough."""
    line = "--num-experts 4 --moe-expert-parallel-size 2 --disable-moe-token-dropping"
    line += " --ds-sequence-parallel-size 2 --slow-rank-factor 2"
    assert fewest_processes(tiny_config(*line.split())) == 4
    assert tiny_plan(*line.split(), world_size=4).parallel.data == 2
    alone = line.replace(" --ds-sequence-parallel-size 2", "")
    assert fewest_processes(tiny_config(*alone.split())) == 4
    assert any("as all 2 replicas do" in problem for problem in problems(alone, world_size=2))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": (1, 4), "experts_per_token": 2},
        {"num_experts": (4, 2), "residual_experts": True},
        {"num_experts": (4, 4), "residual_experts": True, "linear_bias": False},
        {"num_experts": (4, 4), "activation": "swiglu"},
        {
            "num_experts": (4, 4),
            "expert_ffn_hidden_size": 6,
            "shared_expert_ffn_hidden_size": 12,
            "shared_expert_gate": True,
        },
    ],
    ids=str,
)
def test_the_count_is_that_of_the_module(group, changes):
    spec = tiny_spec(**changes)

    def mixture(spec, parts, **place):
        return PlainMixture(spec, parts, terms=[], **place)

    with torch.device("meta"):
        steps = gpt_steps(
            spec, group=group, rng=OrdinaryStream(), mixed=False, build_mixture=mixture
        )
        model = SequentialModel(steps)
    counts = {name: p.numel() for name, p in model.named_parameters()}
    assert spec.num_parameters == sum(counts.values())
    idle = sum(
        p[spec.moe.experts_per_token :].numel()
        for name, p in model.named_parameters()
        if ".experts." in name
    )
    without = sum(count for name, count in counts.items() if "embed" not in name)
    assert spec.num_parameters_without_embeddings == without
    assert spec.num_active_parameters_without_embeddings == without - idle


def test_operations_are_those_of_the_experts_that_a_token_passes_through():
    recompute = tiny_plan().recompute
    lone = tiny_spec().flops_per_sample(recompute=recompute)
    spec = tiny_spec(num_experts=(4, 4), experts_per_token=2)
    mlp, router = 2 * 8 * 32, 4 * 8
    expected = lone + 6 * 6 * 2 * (mlp + router)
    assert spec.flops_per_sample(recompute=recompute) == expected


@pytest.mark.parametrize(
    ("tensor", "per_expert", "expert", "found"),
    [(2, "1", "4", (1, True, 1)), (4, "2", "2", (2, True, 1)), (2, "2", "1", (0, False, 2))],
)
def test_experts_are_divided_apart_from_other_layers(tensor, per_expert, expert, found):
    parallel = tiny_plan(
        *("--num-experts", "4", "--tensor-model-parallel-size", str(tensor)),
        *("--expert-tensor-parallel-size", per_expert, "--expert-model-parallel-size", expert),
        *("--num-attention-heads", "4", "--global-batch-size", "8"),
        world_size=4,
    ).parallel
    assert (parallel.expert_tensor, parallel.divides_experts, parallel.copies_of_experts) == found
