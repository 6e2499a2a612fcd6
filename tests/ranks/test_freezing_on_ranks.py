"""Freezing by name: frozen weights keep their bits, and every layout trains the rest alike."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engines import batches_of, engine_of, trained
from problems import problem
from ranks import outcomes_on_ranks, require_passed
from torch.testing import assert_close

from megatron.checkpointing.manifest import Manifest, record_file
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.checkpointing.resharding.unpickle import read_state
from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ConfigError
from megatron.tensor_parallel.sharding import shard_of

PLAIN = [
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--global-batch-size", "4"),
    *("--pad-vocab-size-to", "16", "--lr", "0.05", "--clip-grad", "0.5"),
]
FREEZE = ["--freeze", "embedding.word", r"layers\.1\.", "dense_4h_to_h.weight$"]
TENSOR = ["--tensor-model-parallel-size", "2"]
SGD = ["--optimizer", "sgd", "--sgd-momentum", "0.9"]
STAGES = ["--pipeline-model-parallel-size", "2"]
LAYOUTS = [
    [*TENSOR, "--sequence-parallel"],
    ["--zero-stage", "1"],
    ["--zero-stage", "2", "--checkpoint-activations"],
    ["--zero-stage", "3"],
]


def is_frozen(name):
    return "word_embeddings" in name or name.startswith("4.") or name.endswith("4h_to_h.weight")


def require_frozen(flags, rank, frozen=is_frozen, expected=None):
    engine, *_ = engine_of(*flags, "--zero-stage", "0")
    begun = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    found = trained(*flags)
    for name, first in begun.items():
        assert torch.equal(found[name], first) == frozen(name), (flags, name)
        if expected:
            whole = (
                expected[name].chunk(2, shard_of_name(engine, name))[rank]
                if (found[name].shape != expected[name].shape)
                else expected[name]
            )
            assert_close(found[name], whole, rtol=1e-4, atol=1e-5)
    return found


def shard_of_name(engine, name):
    return shard_of(dict(engine.module.named_parameters())[name]).dim


def every_layout_keeps_the_bits_of_frozen_weights_and_trains_the_rest_alike(rank):
    expected = require_frozen([*PLAIN, *SGD, *FREEZE], rank)
    for layout in LAYOUTS:
        require_frozen([*PLAIN, *SGD, *FREEZE, *layout], rank, expected=expected)


def stages_and_16_bit_weights_keep_them_too(rank):
    flags = [*PLAIN, *SGD, "--freeze", "embedding", "mlp.dense_h"]

    def frozen(name):
        return "embeddings" in name or "dense_h_to_4h" in name

    expected = require_frozen(flags, rank, frozen)
    require_frozen([*flags, *STAGES], rank, frozen, expected)
    for layout in ([], ["--zero-stage", "1"], ["--zero-stage", "2"], STAGES):
        # A step in 16 bits may round to nothing: of what is trained, only some moves.
        engine, *_ = engine_of(*flags, "--bf16", *layout)
        begun = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        found = trained(*flags, "--bf16", *layout)
        moved = {name for name, first in begun.items() if not torch.equal(found[name], first)}
        assert moved
        assert not [*filter(frozen, moved)], layout


def a_run_goes_on_bit_for_bit_without_state_of_frozen_weights(rank):
    for layout in (TENSOR, ["--zero-stage", "1"], ["--zero-stage", "1", "--bf16"]):
        flags = [*PLAIN, *FREEZE, *layout]
        engine, plan, groups = engine_of(*flags)
        batches = batches_of(plan, groups)
        engine.train_batch(batches)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        folder = Path(folder[0])
        engine.save(folder, "here", {})
        dist.barrier()
        parameters = dict(engine.module.named_parameters()).items()
        manifest = Manifest(
            state=TrainState(),
            plan=plan.to_dict(),
            config={},
            versions={},
            partition_dims={name: s.dim for name, p in parameters if (s := shard_of(p))},
            files=tuple(record_file(file) for file in (folder / "here").iterdir()),
        )
        for name, parameter in read_sharded(folder / "here", manifest).parameters.items():
            assert ("exp_avg" in parameter.states) != is_frozen(name), (layout, name)
        rest = [next(batches) for _ in range(4)]
        straight = [engine.train_batch(iter(rest)) for _ in range(2)]
        resumed, *_ = engine_of(*flags)
        resumed.load(folder, "here", read=read_state)
        assert [resumed.train_batch(iter(rest)) for _ in range(2)] == straight


def patterns_that_freeze_nothing_or_a_stage_are_refused(rank):
    with problem("--freeze embeding … embedding.word_embeddings.weight", ConfigError):
        engine_of(*PLAIN, "--freeze", "embeding")
    with problem("--freeze … nothing to train", ConfigError):
        engine_of(*PLAIN, "--freeze", ".")
    with problem("--freeze leaves rank 0 no matrices … other … stages", ConfigError):
        engine_of(*PLAIN, *STAGES, "--freeze", r"layers\.0", "embedding")


CHECKS = [
    every_layout_keeps_the_bits_of_frozen_weights_and_trains_the_rest_alike,
    stages_and_16_bit_weights_keep_them_too,
    a_run_goes_on_bit_for_bit_without_state_of_frozen_weights,
    patterns_that_freeze_nothing_or_a_stage_are_refused,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
