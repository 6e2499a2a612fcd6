"""Options of a conversion to another layout."""

from dataclasses import asdict

import pytest
from tiny import tiny_config, tiny_plan

from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.train_state import TrainState
from megatron.config.plan.plan import plan
from megatron.training.convert_layout import config_of_layout

T5 = ["--decoder-seq-length", "6", "--max-position-embeddings", "8", "--vocab-extra-ids", "1"]
CHAIN = ["--save", "run", "--load", "run", "--save-interval", "5"]


def converted(saved, decided):
    """Return the options and the plan of a conversion to two tensor-parallel ranks."""
    manifest = Manifest(
        state=TrainState(),
        plan=decided.to_dict(),
        config=asdict(saved),
        versions={},
        partition_dims={},
        files=(),
    )
    options = config_of_layout(saved, manifest, "out", tensor=2, pipeline=1)
    vocab_size = decided.model.vocabulary.vocab_size
    return options, plan(options, world_size=2, vocab_size=vocab_size, device="cpu")


@pytest.mark.parametrize(
    "flags",
    [
        ["--gas", "3", "--train-iters", "10"],
        ["--step-batch-size-schedule", "0:4 60:8", "--train-samples", "80"],
        [
            "--global-batch-size",
            "8",
            "--rampup-batch-size",
            "4",
            "4",
            "40",
            "--train-samples",
            "80",
        ],
    ],
)
def test_the_batch_size_of_two_replicas_is_that_of_one(flags):
    words, options = [*CHAIN, *flags], {"without": ("--train-iters",)}
    saved = tiny_config(*words, **options)
    decided = tiny_plan(*words, world_size=2, **options)
    new = converted(saved, decided)[1].batch
    assert [new.size_at(samples) for samples in (0, 60)] == [
        decided.batch.size_at(samples) for samples in (0, 60)
    ]


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-restarts", "2"],
        ["--world-size", "1"],
        ["--ckpt-step", "5"],
        ["--use-checkpoint-args"],
        ["--chaos", "seed=1,kill=0.1"],
        ["--keep-last", "2", "--async-save", "--exit-on-missing-checkpoint"],
        ["--no-save-optim", "--no-save-rng"],
    ],
)
def test_how_the_run_was_to_go_on_does_not_matter(flags):
    saved, decided = tiny_config(*CHAIN, *flags), tiny_plan(*CHAIN, *flags)
    options, new = converted(saved, decided)
    held = new.checkpoint
    assert (held.save, held.load, held.keep_last, held.in_background) == ("out", "", 0, False)
    assert held.saves_optimizer == decided.checkpoint.saves_optimizer
    assert held.saves_streams == decided.checkpoint.saves_streams
    assert new.parallel.tensor == 2
    assert "chaos" not in options.extensions


def test_the_first_stage_of_a_decoder_belongs_to_the_layout_that_saved_it():
    flags = ["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-split-rank", "1"]
    words, sizes = [*CHAIN, *T5, *flags], {"vocab_size": 11, "device": "cpu", "objective": "t5"}
    decided = plan(tiny_config(*words), world_size=2, **sizes)
    manifest = Manifest(
        state=TrainState(),
        plan=decided.to_dict(),
        config={},
        versions={},
        partition_dims={},
        files=(),
    )
    options = config_of_layout(tiny_config(*words), manifest, "out", tensor=2, pipeline=1)
    assert decided.parallel.split_rank == 1
    assert plan(options, world_size=2, **sizes).parallel.split_rank == 0
