"""Interleaved 1F1B against plain 1F1B: the same steps, bit for bit, and checkpoints of each for the other."""

from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from engines import batches_of, engine_of
from ranks import outcomes_on_ranks, require_passed
from test_reshape_on_ranks import numbers, require_equal, saved, shared_folder, two_steps

from megatron.checkpointing.compare import layout_changes
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.diagnostics.communication import hidden_share, record_communication

FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--num-layers", "8", "--global-batch-size", "16"),
    # The sum of a norm has another order where ranks have other layers.
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--clip-grad", "0"),
)
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
FOUR_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "1")
BF16 = ("--bf16", "--zero-stage", "1", "--zero-reduce-bucket-size", "1000")
SIZES = (16, 8, 16)


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


def steps_are_those_of_1f1b(*flags, chunks=(CHUNKS,)):
    losses, norms, weights = steps_of(*flags)
    for each in chunks:
        found, own_norms, own = steps_of(*flags, *each)
        assert found == losses
        assert own_norms == pytest.approx(norms, rel=1e-6)
        assert own.keys() == weights.keys()
        assert [name for name in weights if not torch.equal(own[name], weights[name])] == []


def fp32_steps_are_those_of_1f1b(rank):
    """Over two replicas; the tied table is on the first and on the last rank."""
    steps_are_those_of_1f1b(chunks=(CHUNKS, FOUR_CHUNKS))


def bf16_steps_are_those_of_1f1b(rank):
    steps_are_those_of_1f1b(*BF16)


def recomputed_steps_on_four_ranks_are_those_of_1f1b(rank):
    """Inner ranks send to different neighbors, and positions travel with the activations."""
    steps_are_those_of_1f1b(
        *("--pipeline-model-parallel-size", "4", "--checkpoint-activations", "--zero-stage", "1"),
        *("--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights"),
    )


def tensor_parallel_steps_are_those_of_1f1b(rank):
    steps_are_those_of_1f1b("--tensor-model-parallel-size", "2", "--sequence-parallel")


def gradients_of_every_chunk_are_reduced_beside_backward(rank):
    wide = ("--hidden-size", "16", "--num-layers", "32", "--untie-embeddings-and-output-weights")
    engine, plan, groups = engine_of(*FLAGS, *BF16, *CHUNKS, *wide)
    batches = batches_of(plan, groups)
    engine.train_batch(batches)
    _ = engine.module  # waits for the weights
    with record_communication() as record:
        engine.train_batch(batches)
    reductions = [each for each in record.collectives if each.kind == "reduce"]
    assert len(reductions) > 10
    assert hidden_share(reductions) >= 0.85


def checkpoints_of_either_schedule_go_on_in_the_other(rank):
    """Weights, moments and the next losses, ZeRO or not; in its own layout without resharding."""
    layouts = ["", *("--num-virtual-stages-per-pipeline-rank 2",) * 2, "--zero-stage 1"]
    layouts += ["--zero-stage 1 --num-layers-per-virtual-pipeline-stage 1", ""]
    with shared_folder() as folder:
        manifest, expected, losses = None, None, None
        for number, layout in enumerate(layouts):
            engine, plan, groups = engine_of(*FLAGS, *layout.split())
            if manifest is None:
                two_steps(engine, plan, groups)
            elif layout == layouts[number - 1]:
                assert not layout_changes(manifest.plan, asdict(plan))
                engine.load(folder, str(number - 1), read=read_state)
            else:
                assert layout_changes(manifest.plan, asdict(plan))
                engine.load_full(read_sharded(folder / str(number - 1), manifest, verify=False))
            manifest = saved(engine, plan, folder, str(number))
            found = numbers(read_sharded(folder / str(number), manifest))
            expected = expected or found
            require_equal(found, expected, layout)
            own = two_steps(engine, plan, groups)
            losses = losses or own
            assert own == pytest.approx(losses, rel=1e-6), layout


CHECKS = [
    fp32_steps_are_those_of_1f1b,
    bf16_steps_are_those_of_1f1b,
    recomputed_steps_on_four_ranks_are_those_of_1f1b,
    tensor_parallel_steps_are_those_of_1f1b,
    gradients_of_every_chunk_are_reduced_beside_backward,
    checkpoints_of_either_schedule_go_on_in_the_other,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(4, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_four_ranks(check, outcomes):
    require_passed(check, outcomes)
