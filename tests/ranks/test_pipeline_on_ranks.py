"""Two pipeline stages in DeepSpeed's engine against plain PyTorch in one process."""

import logging
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import partial

import pytest
import torch
from networks import gpt_steps
from problems import problem
from ranks import outcomes_on_ranks, require_passed
from syncs import counted_syncs, host_state
from tiny import GEMMA, tiny_plan
from torch.testing import assert_close

from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.engine.build import build_engine
from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.recompute import start_streams
from megatron.engine.optimizers import engine_optimizer
from megatron.engine.pipeline_engine import PipelineEngine
from megatron.engine.pipeline_module import pipeline_module
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import CAUSAL_FIELDS, gpt_batch
from megatron.optimizer.param_groups import param_groups
from megatron.tensor_parallel.process_groups import build_groups, lone_group
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.topology import Topology

FLAGS = [
    *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4"),
    *("--optimizer", "sgd", "--sgd-momentum", "0.9", "--weight-decay", "0.1"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0.5"),
]
LLAMA = [
    *("--use-rotary-position-embeddings", "--normalization", "RMSNorm", "--swiglu"),
    *("--group-query-attention", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
]
GRID = Topology(pipeline=2, data=1, tensor=1)
RAMP = [2, 2, 4, 8, 4]
fill = partial(initialise, seed=1, std=0.3, num_layers=2)


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield gpt_batch(torch.randint(11, (2, 7), generator=generator))


def engine_of(*flags):
    distributed.start("gloo")
    groups, plan = build_groups(GRID), tiny_plan(*FLAGS, *flags, world_size=2)
    return build_engine(
        gpt_steps(
            plan.model,
            group=groups.tensor,
            rng=start_streams(groups, seed=5, activation_checkpointing={}),
            mixed=plan.precision.is_mixed,
        ),
        loss=next_token_loss(groups.tensor),
        groups=groups,
        parallel=plan.parallel,
        recompute=plan.recompute,
        initialise=fill,
        build_optimizer=partial(
            engine_optimizer, plan=plan.optimizer, lr=0.1, tensor_group=groups.tensor
        ),
        config=plan.deepspeed,
        batch_fields=tuple(CAUSAL_FIELDS),
    )


def plain(*flags):
    plan = tiny_plan(*FLAGS, *flags, world_size=2)
    model = SequentialModel(
        gpt_steps(plan.model, group=lone_group(), rng=OrdinaryStream(), mixed=False)
    )
    fill(model)
    return model, torch.optim.SGD(param_groups(model, 0.1), lr=0.1, momentum=0.9)


def steps_are_those_of_plain_pytorch(rank, *flags):
    """Loss, norm and weights over steps of changing size; the tied weight counts once."""
    engine, (model, optimizer) = engine_of(*flags), plain(*flags)
    read, own = batches(), batches()
    for samples in RAMP:
        engine.set_global_batch_size(samples)
        losses = []
        for _ in range(samples // 2):
            given = next(own)
            losses.append(next_token_loss(lone_group())(model(given), given))
        mean = torch.stack(losses).mean()
        optimizer.zero_grad()
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert_close(engine.train_batch(read).squeeze(), mean.detach())
        assert engine.grad_norm == pytest.approx(float(norm), rel=1e-4)
    expected = dict(model.named_parameters())
    held = dict(engine.module.named_parameters())
    assert set(held) < set(expected)
    for name, parameter in held.items():
        assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)


def without_zero_steps_are_those_of_plain_pytorch(rank):
    steps_are_those_of_plain_pytorch(rank, "--zero-stage", "0")


def with_zero_1_steps_are_those_of_plain_pytorch(rank):
    steps_are_those_of_plain_pytorch(rank, "--zero-stage", "1")


def with_recomputation_steps_are_those_of_plain_pytorch(rank):
    steps_are_those_of_plain_pytorch(rank, "--checkpoint-activations")


def a_llama_s_steps_are_those_of_plain_pytorch(rank):
    """Positions travel beside the activations, and nothing is tied."""
    steps_are_those_of_plain_pytorch(rank, *LLAMA)


def a_gemma_s_steps_are_those_of_plain_pytorch(rank):
    steps_are_those_of_plain_pytorch(rank, *GEMMA, "--checkpoint-activations")


def a_residual_stream_in_32_bits_travels_between_16_bit_stages(rank):
    flags = [*LLAMA, "--fp32-residual-connection"]
    engine, (model, _) = engine_of(*flags, "--bf16", "--global-batch-size", "2"), plain(*flags)
    given = next(batches())
    expected = next_token_loss(lone_group())(model(given), given)
    layer = engine.module.get_submodule("3" if rank == 0 else "4")
    seen = []
    layer.register_forward_hook(
        lambda own, given, made: seen.extend([given[0].hidden, made.hidden])
    )
    assert float(engine.train_batch(batches())) == pytest.approx(float(expected.detach()), rel=0.02)
    assert [x.dtype for x in seen] == [torch.float32, torch.float32]
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}


def a_step_waits_for_the_device_a_few_times(rank):
    """For the norm and the loss, and not between micro-batches."""
    read = batches()

    def watched(syncs):
        for _ in range(4):
            syncs.mark()
            yield next(read)
        syncs.mark()

    for flags in ([], ["--bf16"]):
        engine = engine_of(*flags, "--global-batch-size", "8")
        engine.train_batch(read)  # sends shapes, once
        with counted_syncs(on_host=host_state(engine)) as syncs:
            float(engine.train_batch(watched(syncs)))
            assert isinstance(engine.grad_norm, float)
        assert syncs.marks[-1] == 0, syncs.lines
        assert sum(syncs.lines.values()) == 2, syncs.lines


def without_clipping_the_norm_is_told_all_the_same(rank):
    engine, (model, _) = engine_of("--clip-grad", "0", "--global-batch-size", "2"), plain()
    given = next(batches())
    next_token_loss(lone_group())(model(given), given).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
    engine.train_batch(batches())
    assert engine.grad_norm == pytest.approx(float(expected), rel=1e-4)


def evaluation_is_the_mean_on_all_ranks(rank):
    engine, (model, _) = engine_of(), plain()
    read = batches()
    with torch.no_grad():
        losses = [
            next_token_loss(lone_group())(model(given), given)
            for given in (next(read) for _ in range(3))
        ]
    assert_close(engine.evaluate(batches(), 3).squeeze(), torch.stack(losses).mean())


def layers_are_numbered_and_named_as_in_one_process(rank):
    engine, (model, _) = engine_of(), plain()
    assert isinstance(engine, PipelineEngine)
    expected = {
        name: p.shape
        for name, p in model.named_parameters()
        if name.startswith(("tied", "3.") if rank == 0 else ("4.", "6.", "tied"))
        and not (rank == 1 and "position" in name)
    }
    assert {name: p.shape for name, p in engine.module.named_parameters()} == expected


def module_of(method):
    steps = gpt_steps(tiny_plan().model, group=lone_group(), rng=OrdinaryStream(), mixed=False)
    return pipeline_module(
        steps,
        topology=GRID,
        loss=next_token_loss(lone_group()),
        partition_method=method,
        recompute=NOTHING,
        batch_fields=tuple(CAUSAL_FIELDS),
    )


def a_stage_without_weights_is_refused(rank):
    with problem("--pp-partition-method … stage 0 … type:transformer"):
        module_of("type:take_tokens|^embeddingpipe")


def a_pattern_that_matches_nothing_is_refused(rank):
    with problem("--pp-partition-method type:mamba"):
        module_of("type:mamba")


def other_partitions_are_deepspeed_s(rank):
    assert module_of("uniform").parts == [0, 4, 8]
    # Both transformer layers outweigh the rest: one on each side.
    assert module_of("parameters").parts[1] == 4


def stages_are_told_with_their_layers_and_weights(rank):
    output = []
    handler = logging.Handler()
    handler.emit = lambda record: output.append(record.getMessage())
    log = logging.getLogger("megatron.engine.pipeline_module")
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    module = module_of("type:transformer")
    log.removeHandler(handler)
    held = sum(p.numel() for p in module.parameters())
    layers = ("1 EmbeddingPipe, 1 Par", "1 ParallelTransformerLayerPipe, 1 LayerNorm, 1 OutputEmb")
    assert f"stage {rank}: entries {4 * rank} to {3 + 4 * rank} | {layers[rank]}" in output[rank]
    assert output[rank].endswith(f" | parameters: {held}")


CHECKS = [
    without_zero_steps_are_those_of_plain_pytorch,
    with_zero_1_steps_are_those_of_plain_pytorch,
    with_recomputation_steps_are_those_of_plain_pytorch,
    a_llama_s_steps_are_those_of_plain_pytorch,
    a_gemma_s_steps_are_those_of_plain_pytorch,
    a_residual_stream_in_32_bits_travels_between_16_bit_stages,
    evaluation_is_the_mean_on_all_ranks,
    layers_are_numbered_and_named_as_in_one_process,
    a_stage_without_weights_is_refused,
    other_partitions_are_deepspeed_s,
    without_clipping_the_norm_is_told_all_the_same,
    a_step_waits_for_the_device_a_few_times,
    a_pattern_that_matches_nothing_is_refused,
    stages_are_told_with_their_layers_and_weights,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_stages(check, outcomes):
    require_passed(check, outcomes)
