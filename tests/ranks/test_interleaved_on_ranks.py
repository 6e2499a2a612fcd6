"""Interleaved and zero-bubble schedules against 1F1B: equal steps, and checkpoints of each for the others."""

import pytest
import torch
import torch.distributed as dist
from communication import hidden_share, record_communication
from engines import DOCUMENTS, batches_of, deepspeed_of, engine_of, trained
from ranks import outcomes_on_ranks, require_passed
from test_reshape_on_ranks import numbers, require_equal, saved, shared_folder, two_steps
from torch.testing import assert_close

from megatron.checkpointing.compare import layout_changes
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.engine.deepspeed.patches.pipeline import wrap_instructions
from megatron.engine.deepspeed.patches.runtime import any_dtype
from megatron.pipeline.schedule import program_of

FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--num-layers", "8", "--global-batch-size", "16"),
    # The sum of a norm has another order where ranks have other layers.
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0"),
)
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
FOUR_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1")
UNEQUAL_CHUNKS = ("--pipeline-model-parallel-layout", "Et|t*4|ttt|L")
ZERO_BUBBLE = ("--enable-zbh1-pipeline",)
BF16 = ("--bf16", "--zero-stage", "1", "--zero-reduce-bucket-size", "1000")
SIZES = (16, 8, 16)
DIRECTIONS = {"ForwardPass": "forward", "BackwardPass": "backward", "WeightPass": "weight"}
"""The instructions of passes, and what schedules call them."""


def steps_of(*flags):
    """Return losses of steps of changing size and of evaluations between, norms, and all weights."""
    engine, plan, groups = engine_of(*FLAGS, *flags)
    batches = batches_of(plan, groups)
    losses, norms = [], []
    for number, samples in enumerate(SIZES, 1):
        engine.set_global_batch_size(samples)
        losses += [float(engine.train_batch(batches)), float(engine.evaluate(batches, number))]
        norms.append(engine.grad_norm)
    return losses, norms, weights_of(engine)


def weights_of(engine):
    """Return the weights of all ranks by name."""
    own = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return {name: weight for each in everyones for name, weight in each.items()}


def steps_are_those_of_1f1b(*flags, schedules):
    losses, norms, weights = steps_of(*flags)
    for each in schedules:
        found, own_norms, own = steps_of(*flags, *each)
        assert found == losses
        assert own_norms == pytest.approx(norms, rel=1e-6)
        assert own.keys() == weights.keys()
        assert [name for name in weights if not torch.equal(own[name], weights[name])] == []


def fp32_steps_are_those_of_1f1b(rank):
    """Over two replicas; the tied table is on the first and on the last rank."""
    unequal = ("--decoder-last-pipeline-num-layers", "1")
    steps_are_those_of_1f1b(
        schedules=(
            *(CHUNKS, (*ZERO_BUBBLE, *FOUR_CHUNKS), ZERO_BUBBLE, unequal),
            *(UNEQUAL_CHUNKS, (*ZERO_BUBBLE, *UNEQUAL_CHUNKS)),
        )
    )


def bf16_steps_are_those_of_1f1b(rank):
    steps_are_those_of_1f1b(*BF16, schedules=(CHUNKS, ZERO_BUBBLE, UNEQUAL_CHUNKS))


def dropout_and_clipping_are_those_of_1f1b(rank):
    """The zero-bubble schedule keeps the order of forward passes, and of all sums."""
    flags = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1", "--clip-grad", "0.5")
    found = [steps_of(*flags, *schedule)[:2] for schedule in ((), ZERO_BUBBLE)]
    assert found[0] == found[1]


def recomputed_steps_on_four_ranks_are_those_of_1f1b(rank):
    """Inner ranks send to different neighbors, and positions travel with the activations."""
    steps_are_those_of_1f1b(
        *("--pipeline-model-parallel-size", "4", "--checkpoint-activations", "--zero-stage", "1"),
        *("--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights"),
        schedules=(CHUNKS, ZERO_BUBBLE, ("--pp-partition-method", "layers:1,3,4,0")),
    )


def tensor_parallel_steps_are_those_of_1f1b(rank):
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    steps_are_those_of_1f1b(*flags, schedules=(CHUNKS, (*ZERO_BUBBLE, *CHUNKS)))


def fp16_steps_are_those_of_1f1b(rank):
    """The dynamic loss scale refuses the first steps of all schedules alike."""
    with any_dtype():
        for stage in ("0", "1"):
            steps_are_those_of_1f1b(
                "--fp16", "--zero-stage", stage, schedules=(CHUNKS, ZERO_BUBBLE)
            )


def adapters_and_documents_take_the_steps_of_1f1b(rank):
    adapters = ("--lora-rank", "2", "--lora-target-modules", "all-linear")
    steps_are_those_of_1f1b(
        *(*adapters, *DOCUMENTS, "--recompute-granularity", "selective"),
        schedules=(CHUNKS,),
    )


def an_infinite_gradient_of_one_rank_refuses_the_step_on_all(rank):
    for flags in ((), BF16):
        for schedule in (CHUNKS, ZERO_BUBBLE):
            engine, plan, groups = engine_of(*FLAGS, *flags, *schedule)
            batches = batches_of(plan, groups)
            before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            spoilt = max(name for name in before if before[name].dim() == 1)
            hook = None
            if rank == 3:
                weight = dict(engine.module.named_parameters())[spoilt]
                hook = weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
            engine.train_batch(batches)
            assert (engine.skipped_steps, engine.grad_norm) == (1, torch.inf)
            assert_close(dict(engine.module.named_parameters()), before, rtol=0, atol=0)
            if hook:
                hook.remove()
            assert float(engine.train_batch(batches)) < torch.inf
            assert engine.skipped_steps == 1
            assert engine.grad_norm < torch.inf


def gradients_of_every_chunk_are_reduced_beside_backward(rank):
    wide = ("--hidden-size", "16", "--num-layers", "32", "--untie-embeddings-and-output-weights")
    engine, plan, groups = engine_of(*FLAGS, *BF16, *CHUNKS, *wide)
    batches = batches_of(plan, groups)
    engine.train_batch(batches)
    _ = engine.module  # waits for the weights
    with record_communication() as record:
        engine.train_batch(batches)
    reductions = [each for each in record.collectives if each.kind == "reduce-scatter"]
    assert len(reductions) > 10
    assert hidden_share(reductions) >= 0.85


def weight_passes_run_as_scheduled_and_complete_the_gradients_that_are_reduced(rank):
    """Recorded instructions against the program; a gradient without a value refuses one step."""
    wide = ("--hidden-size", "16", "--num-layers", "16", "--untie-embeddings-and-output-weights")
    engine, plan, groups = engine_of(*FLAGS, *BF16, *ZERO_BUBBLE, *wide)
    batches, module = batches_of(plan, groups), engine.module
    engine.train_batch(batches)
    grid = module.grid(plan.batch.num_micro_batches(16))
    passes, exchanges, put_off = [], [], []

    def watch(name, call):
        def run(engine, *args, **kwargs):
            if name in DIRECTIONS:
                passes.append(DIRECTIONS[name])
            if name == "ForwardPass":
                put_off.append(len(module.weight_gradients))
            if name == "Exchange":
                exchanges.append((len(kwargs["sends"]), len(kwargs["receives"])))
            return call(engine, *args, **kwargs)

        return run

    wrap_instructions(deepspeed_of(engine), watch)
    with record_communication() as record:
        engine.train_batch(batches)
    assert passes == [each.direction for each in grid.passes(groups.stage)]
    assert exchanges == [
        (len(each.sends), len(each.receives))
        for each in program_of(grid, groups.stage)
        if each.sends or each.receives
    ]
    assert max(put_off) == grid.passes_put_off(groups.stage)
    assert len(module.weight_gradients) == 0
    reductions = [each for each in record.collectives if each.kind == "reduce-scatter"]
    assert len(reductions) > 10
    assert hidden_share(reductions) >= 0.8
    before, skipped = weights_of(engine), engine.skipped_steps
    name, weight = next((n, p) for n, p in module.named_parameters() if "h_to_4h.weight" in n)
    hook = weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    engine.train_batch(batches)
    hook.remove()
    assert (engine.skipped_steps, engine.grad_norm) == (skipped + 1, torch.inf), name
    after = weights_of(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert float(engine.train_batch(batches)) < torch.inf


def checkpoints_of_either_schedule_go_on_in_the_other(rank):
    """Weights, moments and the next losses, ZeRO or not; in its own layout without resharding."""
    layouts = ["", *("--num-virtual-stages-per-pipeline-rank 2",) * 2, "--zero-stage 1"]
    layouts += ["--zero-stage 1 --num-layers-per-virtual-pipeline-stage 1", ""]
    layouts += ["--pp-partition-method layers:3,5", " ".join(UNEQUAL_CHUNKS), ""]
    layouts += ["--enable-zbh1-pipeline", "--enable-zbh1-pipeline --zero-stage 1"]
    with shared_folder() as folder:
        manifest, expected, losses = None, None, None
        for number, layout in enumerate(layouts):
            engine, plan, groups = engine_of(*FLAGS, *layout.split())
            if manifest is None:
                two_steps(engine, plan, groups)
            elif not layout_changes(manifest.plan, plan.to_dict()):
                assert layout in (layouts[number - 1], *ZERO_BUBBLE)
                engine.load(folder, str(number - 1), read=read_state)
            else:
                assert layout != layouts[number - 1]
                engine.load_full(read_sharded(folder / str(number - 1), manifest, verify=False))
            manifest = saved(engine, plan, folder, str(number))
            found = numbers(read_sharded(folder / str(number), manifest))
            expected = expected or found
            require_equal(found, expected, layout)
            own = two_steps(engine, plan, groups)
            losses = losses or own
            assert own == pytest.approx(losses, rel=1e-6), layout


def stages_of_embeddings_alone_take_the_steps_of_replicas(rank):
    """Two layers and two embeddings make four stages, as 70 layers made BLOOMZ's 72."""
    flags = ("--global-batch-size", "8", "--embed-layernorm", "--clip-grad", "0.5")
    flags += ("--attention-dropout", "0", "--hidden-dropout", "0", "--zero-stage", "1")
    stages = ("--pipeline-model-parallel-size", "4")
    stages += ("--pp-partition-method", "type:transformer|embedding", "--checkpoint-activations")
    replicas = trained(*flags)
    for schedule in ((), ZERO_BUBBLE):
        found = trained(*flags, *stages, *schedule)
        for name in ("losses", "norms"):
            assert found[name].tolist() == pytest.approx(replicas[name].tolist(), rel=1e-5)


CHECKS = [
    stages_of_embeddings_alone_take_the_steps_of_replicas,
    fp32_steps_are_those_of_1f1b,
    bf16_steps_are_those_of_1f1b,
    dropout_and_clipping_are_those_of_1f1b,
    recomputed_steps_on_four_ranks_are_those_of_1f1b,
    tensor_parallel_steps_are_those_of_1f1b,
    fp16_steps_are_those_of_1f1b,
    adapters_and_documents_take_the_steps_of_1f1b,
    an_infinite_gradient_of_one_rank_refuses_the_step_on_all,
    gradients_of_every_chunk_are_reduced_beside_backward,
    weight_passes_run_as_scheduled_and_complete_the_gradients_that_are_reduced,
    checkpoints_of_either_schedule_go_on_in_the_other,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check, outcomes):
    require_passed(check, outcomes)
