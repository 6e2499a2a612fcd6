"""Experts over two and four processes against plain torch in one."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from engines import batches_of, trained
from engines import engine_of as engine_of_run
from networks import gpt_steps
from plain_mixture import PlainMixture
from ranks import outcomes_on_ranks, require_passed
from shared_groups import end_engines
from tiny import tiny_plan, tiny_spec
from torch.testing import assert_close

from megatron.engine.build import build_engine
from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.recompute import start_streams
from megatron.engine.experts import mixture_builder
from megatron.engine.optimizers import engine_optimizer
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss
from megatron.model.layers.router import Router, count_choices
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import CAUSAL_FIELDS, gpt_batch
from megatron.optimizer.build import build_optimizer
from megatron.tensor_parallel.process_groups import build_groups, lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import expert_share_of, is_expert, shard_of
from megatron.tensor_parallel.topology import Topology

FLAGS = [
    *("--num-experts", "4", "--expert-interval", "1", "--moe-loss-coeff", "0.3"),
    *("--disable-moe-token-dropping", "--disable-moe-top2-2nd-expert-sampling"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--pad-vocab-size-to", "12"),
    *("--clip-grad", "0.5", "--weight-decay", "0.2", "--adam-eps", "1e-3"),
    *("--log-num-zeros-in-grad", "--micro-batch-size", "2"),
]
SHARED = ["--moe-expert-parallel-size", "2"]
DIVIDED = ["--tensor-model-parallel-size", "2"]
FULL = ["--expert-tensor-parallel-size", "1"]
LR, STEPS = 0.02, 2
fill = partial(initialise, seed=1, std=0.3, num_layers=2)


def micro_batch(number):
    generator = torch.Generator().manual_seed(number)
    return gpt_batch(torch.randint(11, (2, 7), generator=generator))


def engine_of(*flags, device="cpu"):
    """Return an engine over all ranks, its plan and this rank's replica."""
    end_engines()
    distributed.start("gloo")
    plan = tiny_plan(*FLAGS, *flags, world_size=dist.get_world_size(), device=device)
    parallel = plan.parallel
    groups = build_groups(
        Topology(
            pipeline=parallel.pipeline,
            data=parallel.data,
            tensor=parallel.tensor,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
        )
    )
    rng = start_streams(groups, seed=5, activation_checkpointing={})
    auxiliary = AuxiliaryLoss(plan.model.moe.num_experts)
    engine = build_engine(
        gpt_steps(
            plan.model,
            group=groups.tensor,
            rng=rng,
            mixed=plan.precision.is_mixed,
            build_mixture=mixture_builder(plan.experts, groups, auxiliary=auxiliary),
            sequence_parallel=parallel.sequence_parallel,
        ),
        loss=next_token_loss(groups.tensor),
        groups=groups,
        parallel=parallel,
        recompute=plan.recompute,
        initialise=fill,
        build_optimizer=partial(
            engine_optimizer, plan=plan.optimizer, lr=LR, tensor_group=groups.tensor
        ),
        config=plan.deepspeed,
        batch_fields=tuple(CAUSAL_FIELDS),
        counts_zeros=True,
        auxiliary=auxiliary,
    )
    return engine, plan, groups.data_rank


class PlainRun:
    """The same network and steps in one process, where the loss is written out."""

    def __init__(self, plan):
        self.plan, self.terms, alone = plan, [], lone_group()
        mixture = partial(PlainMixture, terms=self.terms)
        steps = gpt_steps(
            plan.model, group=alone, rng=OrdinaryStream(), mixed=False, build_mixture=mixture
        )
        self.model, self.loss = SequentialModel(steps), next_token_loss(alone)
        fill(self.model)
        self.optimizer = build_optimizer(self.model, plan.optimizer, LR, tensor_group=alone)

    def step(self, numbers):
        """Return the loss, what experts add to it, the gradient's norm and its zeros."""
        self.model.zero_grad()
        self.terms.clear()
        losses = []
        for given in map(micro_batch, numbers):
            losses.append(self.loss(self.model(given), given))
        added = 0.3 * sum(self.terms) / len(losses)
        (sum(losses) / len(losses) + added).backward()
        zeros = sum(int((p.grad == 0).sum()) for p in self.model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self.plan.optimizer.clip_grad
        )
        self.optimizer.step()
        return float(sum(losses) / len(losses)), float(added), float(norm), zeros


def weights_norm(model):
    return float(sum(p.double().square().sum() for p in model.parameters())) ** 0.5


def require_same_weights(engine, model, **tolerance):
    for name, p in engine.module.named_parameters():
        share, shard = expert_share_of(p), shard_of(p)
        whole = model.get_parameter(name).chunk(share.replicas)[share.index]
        expected = whole if shard is None else whole.chunk(shard.count, shard.dim)[shard.index]
        # Keys' biases have no gradient but rounding errors, which adam blows up.
        if not name.endswith("query_key_value.bias"):
            assert_close(p.detach(), expected.detach(), msg=lambda m, n=name: n + m, **tolerance)


def require_same_path(rank, *flags):
    """Compare the records of steps, and the weights before and after, with the plain run."""
    engine, plan, replica = engine_of(*flags)
    plain = PlainRun(plan)
    require_same_weights(engine, plain.model, rtol=0, atol=0)
    replicas, each = plan.parallel.data, plan.batch.num_micro_batches(plan.batch.size_at(0))
    for step in range(STEPS):
        first = step * replicas * each
        mine = range(first + each * replica, first + each * (replica + 1))
        loss = float(engine.train_batch(iter([micro_batch(n) for n in mine])))
        expected = plain.step(range(first, first + replicas * each))
        found = loss, engine.expert_load.loss, engine.grad_norm
        assert found == pytest.approx(expected[:3], rel=1e-5), (flags, step, found, expected)
        assert engine.expert_load.dropped == 0, flags
        chosen = plan.model.moe.experts_per_token * replicas * each * 2 * 6
        expected_choices = [chosen if count > 1 else 0 for count in plan.model.moe.num_experts]
        assert engine.expert_load.assigned.sum(1).tolist() == expected_choices, flags
        # Those of the 16 keys' biases are rounding errors, which may be zero or not.
        assert engine.num_zeros == pytest.approx(expected[3], abs=16), (flags, step)
    require_same_weights(engine, plain.model, rtol=1e-5, atol=1e-5)
    assert engine.params_norm() == pytest.approx(weights_norm(plain.model), rel=1e-5)


def shared_experts_step_like_plain_torch_at_every_stage(rank):
    for stage in range(3):
        zero = ["--zero-stage", str(stage)]
        require_same_path(rank, *SHARED, *zero, "--topk", "2", "--global-batch-size", "8")
    require_same_path(rank, *SHARED, "--topk", "1", "--mlp-type", "residual")
    llama = ["--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"]
    require_same_path(rank, *SHARED, *llama, "--topk", "3", "--checkpoint-activations")


def muon_steps_on_the_matrices_of_each_expert(rank):
    muon = ["--optimizer", "muon", "--muon-extra-scale-factor", "0.1", "--topk", "2"]
    for stage in range(3):
        for layout in (SHARED, DIVIDED, [], [*SHARED, *DIVIDED, *FULL]):
            require_same_path(rank, *layout, *muon, "--zero-stage", str(stage))


def experts_of_one_replica_step_like_plain_torch(rank):
    for stage in range(3):
        require_same_path(rank, "--zero-stage", str(stage), "--topk", "2")


def experts_divided_over_tensor_ranks_step_like_plain_torch(rank):
    for stage in range(3):
        require_same_path(rank, *DIVIDED, "--zero-stage", str(stage), "--topk", "2")
    require_same_path(rank, *DIVIDED, "--topk", "1", "--swiglu", "--mlp-type", "residual")
    require_same_path(rank, *DIVIDED, "--topk", "2", "--checkpoint-activations")


def experts_step_alike_where_tensor_ranks_divide_the_sequence(rank):
    divided = [*DIVIDED, "--sequence-parallel", "--seq-length", "6"]
    core = ["--moe-token-dispatcher-type", "alltoall", "--moe-shared-expert-intermediate-size", "6"]
    require_same_path(rank, *divided, *core, "--topk", "2", "--disable-bias-linear", "--swiglu")
    require_same_path(rank, *divided, "--topk", "1", "--zero-stage", "1")


def full_experts_of_tensor_ranks_step_like_plain_torch(rank):
    for size in "1", "2":
        for stage in range(3):
            layout = [*DIVIDED, *FULL, "--moe-expert-parallel-size", size]
            require_same_path(rank, *layout, "--zero-stage", str(stage), "--topk", "2")
    divided = [*DIVIDED, *FULL, *SHARED, "--sequence-parallel", "--seq-length", "6"]
    require_same_path(rank, *divided, "--topk", "2", "--swiglu", "--checkpoint-activations")


def experts_step_alike_in_pipelines(rank):
    stages = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "8"]
    for zero in range(2):
        require_same_path(rank, *stages, "--zero-stage", str(zero), "--topk", "2")
    require_same_path(rank, *stages, "--topk", "1", "--checkpoint-activations")


STAGES = ["--pipeline-model-parallel-size", "2"]
OFFLOADED = ["--cpu-optimizer", "--cpu_torch_adam"]
OF_8 = ["--topk", "2", "--global-batch-size", "8"]


def replicas_that_divide_experts_in_several_ways_step_alike(rank):
    for size in "1", "2", "4":
        require_same_path(rank, "--moe-expert-parallel-size", size, *OF_8)
    require_same_path(rank, "--moe-expert-parallel-size", "2", *OF_8, "--zero-stage", "2")


def experts_divided_over_replicas_and_tensor_ranks_step_alike(rank):
    for stage in range(3):
        require_same_path(rank, *SHARED, *DIVIDED, "--zero-stage", str(stage), *OF_8)
    require_same_path(rank, *SHARED, *DIVIDED, *OFFLOADED, "--zero-stage", "2", *OF_8)
    divided = [*SHARED, *DIVIDED, "--sequence-parallel", "--seq-length", "6"]
    require_same_path(rank, *divided, *OF_8, "--zero-stage", "1")


def experts_of_other_numbers_of_ranks_step_alike(rank):
    four = ["--tensor-model-parallel-size", "4", "--num-attention-heads", "4"]
    for layout in (
        [*DIVIDED, *FULL, "--moe-expert-parallel-size", "4", "--zero-stage", "1"],
        [*DIVIDED, *FULL, *SHARED, *STAGES, "--zero-stage", "1"],
        [*DIVIDED, *FULL, *STAGES],
        [*four, *SHARED, "--expert-tensor-parallel-size", "2"],
        [*four, *FULL, *SHARED, "--zero-stage", "2"],
        [*DIVIDED, *SHARED, *FULL, *OFFLOADED, "--zero-stage", "2"],
        ["--expert-tensor-parallel-size", "2", *SHARED, "--zero-stage", "1"],
    ):
        require_same_path(rank, *layout, *OF_8)
    some = [*four, *SHARED, "--expert-tensor-parallel-size", "2", "--optimizer", "muon"]
    require_same_path(rank, *some, "--muon-extra-scale-factor", "0.1", "--topk", "2")
    sequence = ["--sequence-parallel", "--seq-length", "6"]
    require_same_path(rank, *DIVIDED, *FULL, *SHARED, *sequence, *OF_8)


def a_capacity_is_that_of_a_micro_batch_where_tensor_ranks_exchange_their_own_tokens(rank):
    given = [each for each in FLAGS if "--disable-moe-token-dropping" not in each]
    given += ["--moe-expert-capacity-factor", "0.6", "--moe-min-capacity", "1", *OF_8]
    for policy in "probs", "position":
        found = []
        for layout in (
            SHARED,
            [*SHARED, *DIVIDED, "--sequence-parallel"],
            [*SHARED, *DIVIDED, *FULL],
        ):
            engine, plan, groups = engine_of_run(*given, "--moe-token-drop-policy", policy, *layout)
            batches = batches_of(plan, groups)
            for _ in range(STEPS):
                loss = float(engine.train_batch(batches))
                load = engine.expert_load
                found.append((loss, engine.grad_norm, load.loss, load.dropped))
        assert found[STEPS:] == [pytest.approx(each, rel=1e-6) for each in 2 * found[:STEPS]]
        assert all(0.2 < dropped < 0.6 for *_, dropped in found)


def experts_divided_over_the_replicas_of_a_pipeline_step_alike(rank):
    for stage in range(2):
        require_same_path(rank, *SHARED, *STAGES, "--zero-stage", str(stage), *OF_8)
        # The first stage has no experts.
        some = ["--expert-interval", "2", "--zero-stage", str(stage)]
        require_same_path(rank, *SHARED, *STAGES, *some, "--global-batch-size", "8")
    require_same_path(rank, *SHARED, *STAGES, *OF_8, "--checkpoint-activations")
    chunks = ["--num-layers", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
    require_same_path(rank, *SHARED, *STAGES, *OF_8, *chunks)
    split = ["--enable-zbh1-pipeline", "--moe-shared-expert-intermediate-size", "6"]
    require_same_path(rank, *SHARED, *STAGES, *OF_8, *split)


def experts_divided_over_replicas_tensor_ranks_and_stages_step_alike(rank):
    require_same_path(rank, *SHARED, *DIVIDED, *STAGES, *OF_8, "--zero-stage", "1")
    sequence = ["--sequence-parallel", "--seq-length", "6", "--checkpoint-activations"]
    require_same_path(rank, *SHARED, *DIVIDED, *STAGES, *OF_8, *sequence)
    require_same_path(rank, "--moe-expert-parallel-size", "4", *STAGES, *OF_8)


def experts_divided_over_the_parts_of_samples_step_alike(rank):
    given = [*FLAGS, *OF_8, "--seq-length", "6"]
    expected = trained(*given)
    for size, stage, *stages in (
        ("2", "0"),
        ("4", "0"),
        ("4", "1"),
        ("2", "2"),
        ("1", "0", *STAGES),
        ("2", "0", *STAGES),
        ("2", "1", *STAGES),
    ):
        flags = ["--moe-expert-parallel-size", size, "--zero-stage", stage, *stages]
        found = trained(*given, "--ds-sequence-parallel-size", "2", *flags)
        for name in found:
            if ".experts." not in name and "query_key_value.bias" not in name:
                assert_close(found[name], expected[name], rtol=1e-5, atol=1e-5, msg=str(flags))
    for stages in [], STAGES:
        flags = [*SHARED, "--ds-sequence-parallel-size", "2", "--bf16", *stages]
        found = trained(*given, *flags, steps=1)
        for name in "losses", "norms":
            assert_close(found[name], expected[name][:1], rtol=0.03, atol=0)


def a_nan_in_the_gradient_of_one_expert_refuses_the_step(rank):
    for flags in (
        STAGES,
        [*STAGES, "--zero-stage", "1"],
        [*STAGES, "--bf16"],
        [*DIVIDED, "--zero-stage", "2"],
        [*DIVIDED, *OFFLOADED, "--zero-stage", "1"],
    ):
        engine, plan, groups = engine_of_run(*FLAGS, *OF_8, *SHARED, *flags)
        batches = batches_of(plan, groups)
        engine.train_batch(batches)
        expert = next(filter(is_expert, engine.module.parameters()))
        hook = expert.register_hook(lambda grad: grad * (torch.nan if rank == 3 else 1))
        engine.train_batch(batches)
        hook.remove()
        assert (engine.skipped_steps, engine.grad_norm) == (1, torch.inf), flags
        assert float(engine.train_batch(batches)) < torch.inf, flags
        assert engine.skipped_steps == 1, flags


def sixteen_bits_find_the_same_norms_in_every_layout(rank):
    require_same_norms(
        ([*SHARED, *DIVIDED, "--bf16"], "cpu"),
        ([*SHARED, *STAGES, "--bf16"], "cpu"),
        ([*SHARED, *STAGES, "--bf16", "--expert-interval", "2"], "cpu"),
        ([*SHARED, *STAGES, "--fp16", "--loss-scale", "128", "--zero-stage", "1"], "cuda"),
    )


def sixteen_bits_find_the_same_norms(rank):
    require_same_norms(
        ([*SHARED, "--bf16"], "cpu"),
        ([*SHARED, "--bf16", "--optimizer", "muon"], "cpu"),
        ([*SHARED, "--bf16", "--zero-stage", "2"], "cpu"),
        ([*DIVIDED, "--bf16", "--zero-stage", "2"], "cpu"),
        ([*SHARED, "--fp16", "--loss-scale", "128", "--zero-stage", "2"], "cuda"),
    )


def require_same_norms(*layouts):
    """Compare the record of two steps with the plain run in fp32, for layouts with their devices."""
    get_accelerator().is_fp16_supported = lambda: True
    for flags, device in layouts:
        flags = ["--topk", "2", "--global-batch-size", "8", *flags]
        engine, plan, replica = engine_of(*flags, device=device)
        plain = PlainRun(plan)
        replicas, each = plan.parallel.data, plan.batch.num_micro_batches(8)
        mine = range(each * replica, each * (replica + 1))
        for number in range(2):
            loss = float(engine.train_batch(iter([micro_batch(n) for n in mine])))
            expected = plain.step(range(replicas * each))
            found = loss, engine.expert_load.loss, engine.grad_norm
            assert found == pytest.approx(expected[:3], rel=0.03), (flags, number)


def the_loss_of_a_global_batch_counts_the_choices_of_all_replicas(rank):
    distributed.start("gloo")
    spec = tiny_spec(num_experts=(4, 4))
    balancing = ("--moe-router-load-balancing-type", "global_aux_loss", "--moe-loss-coeff", "1")
    plan = tiny_plan("--num-experts", "4", "--topk", "1", *balancing).experts
    auxiliary = AuxiliaryLoss([4, 4])
    router = Router(spec, number=1, plan=plan, data_group=dist.group.WORLD, auxiliary=auxiliary)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(3))
    draw = torch.Generator().manual_seed(4)
    inputs = [torch.randn(9, 2, 8, generator=draw) for _ in range(2)]
    router(inputs[rank])
    shares, means = [], []
    for x in inputs:
        probabilities = (x.flatten(0, 1) @ router.weight.T).softmax(-1)
        shares.append(count_choices(probabilities.argmax(-1), 4) / 18)
        means.append(probabilities.mean(0))
    share, expected = sum(shares) / 2, 0.0
    for mean in means:
        expected += float(4 * (share * mean).sum()) / 2
    found = auxiliary.take(counts=True, micro_batches=2, device=torch.device("cpu")).loss
    assert not torch.equal(*shares)
    assert abs(found - expected) < 1e-6


CHECKS = [
    the_loss_of_a_global_batch_counts_the_choices_of_all_replicas,
    shared_experts_step_like_plain_torch_at_every_stage,
    muon_steps_on_the_matrices_of_each_expert,
    experts_of_one_replica_step_like_plain_torch,
    experts_divided_over_tensor_ranks_step_like_plain_torch,
    experts_step_alike_where_tensor_ranks_divide_the_sequence,
    full_experts_of_tensor_ranks_step_like_plain_torch,
    experts_step_alike_in_pipelines,
    sixteen_bits_find_the_same_norms,
]
CHECKS_OF_FOUR = [
    replicas_that_divide_experts_in_several_ways_step_alike,
    experts_divided_over_replicas_and_tensor_ranks_step_alike,
    experts_of_other_numbers_of_ranks_step_alike,
    a_capacity_is_that_of_a_micro_batch_where_tensor_ranks_exchange_their_own_tokens,
    experts_divided_over_the_replicas_of_a_pipeline_step_alike,
    experts_divided_over_the_parts_of_samples_step_alike,
    a_nan_in_the_gradient_of_one_expert_refuses_the_step,
    sixteen_bits_find_the_same_norms_in_every_layout,
]
CHECKS_OF_EIGHT = [experts_divided_over_replicas_tensor_ranks_and_stages_step_alike]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return {
        **outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("two")),
        **outcomes_on_ranks(4, CHECKS_OF_FOUR, tmp_path_factory.mktemp("four")),
        **outcomes_on_ranks(8, CHECKS_OF_EIGHT, tmp_path_factory.mktemp("eight")),
    }


@pytest.mark.parametrize(
    "check", [*CHECKS, *CHECKS_OF_FOUR, *CHECKS_OF_EIGHT], ids=lambda check: check.__name__
)
def test(check, outcomes):
    require_passed(check, outcomes)
