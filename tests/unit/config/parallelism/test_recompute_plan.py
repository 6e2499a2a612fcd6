"""Activation checkpointing: which parts are recomputed, and options that contradict each other."""

import json

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import ConfigError
from megatron.config.parallelism.recompute_plan import NOTHING, RecomputePlan

FULL = "--recompute-granularity full"


def plan_of(line, **kwargs):
    return tiny_plan(*line.split(), **kwargs)


@pytest.mark.parametrize(
    ("line", "granularity", "method", "num_layers", "share"),
    [
        ("", "none", "uniform", 1, 0.0),
        ("--recompute-activations", "selective", "uniform", 1, 0.0),
        ("--recompute-granularity selective", "selective", "uniform", 1, 0.0),
        ("--checkpoint-activations", "full", "uniform", 1, 1.0),
        ("--checkpoint-activations --checkpoint-num-layers 2", "full", "uniform", 2, 1.0),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 3", "full", "uniform", 3, 1.0),
        (f"{FULL} --recompute-method block --recompute-num-layers 1", "full", "block", 1, 0.5),
        (f"{FULL} --recompute-method block --recompute-num-layers 9", "full", "block", 9, 1.0),
    ],
)
def test_every_spelling_decides_the_same(line, granularity, method, num_layers, share):
    found = plan_of(line).recompute
    assert found == RecomputePlan(
        granularity=granularity, method=method, num_layers=num_layers, share=share
    )


def test_a_block_is_counted_in_every_stage():
    line = f"{FULL} --recompute-method block --recompute-num-layers 1 --num-layers 4"
    layout = "--pipeline-model-parallel-size 2"
    assert plan_of(f"{line} {layout}", world_size=2).recompute.share == 0.5


@pytest.mark.parametrize(
    ("method", "num_layers", "count", "groups"),
    [
        ("uniform", 1, 3, [[0], [1], [2]]),
        ("uniform", 2, 5, [[0, 1], [2, 3], [4]]),
        ("uniform", 9, 3, [[0, 1, 2]]),
        ("block", 2, 5, [[0], [1]]),
        ("block", 9, 2, [[0], [1]]),
        ("block", 1, 0, []),
    ],
)
def test_groups_of_layers(method, num_layers, count, groups):
    plan = RecomputePlan(granularity="full", method=method, num_layers=num_layers, share=1.0)
    assert [list(group) for group in plan.groups(count)] == groups
    assert NOTHING.groups(count) == []


@pytest.mark.parametrize(
    ("line", "output"),
    [
        ("--recompute-activations --checkpoint-activations", "contradict"),
        (f"--recompute-activations {FULL}", "--recompute-activations and --recompute-granularity"),
        ("--recompute-method uniform", "--recompute-method uniform: nothing"),
        ("--recompute-num-layers 2", "--recompute-num-layers 2: nothing"),
        ("--recompute-activations --recompute-num-layers 2", "no full layers"),
        ("--checkpoint-activations --checkpoint-num-layers 0", "layers 0 .* 1"),
        (FULL, "full needs --recompute-method uniform or block and --recompute-num-layers$"),
        (f"{FULL} --recompute-method block", "full needs --recompute-num-layers$"),
        (f"{FULL} --recompute-num-layers 1", "full needs --recompute-method uniform or block$"),
        ("--partition-activations", "--distribute-saved-activations: nothing"),
        ("--recompute-activations --checkpoint-in-cpu", "--checkpoint-in-cpu: "),
        ("--checkpoint-activations --partition-activations", "one tensor-parallel"),
        ("--checkpoint-activations --contigious-checkpointing", "needs --partition-activations"),
        ("--checkpoint-activations --checkpoint-in-cpu", "on CPUs"),
        ("--synchronize-each-layer", "--synchronize-each-layer: nothing"),
        ("--profile-backward", "--profile-backward: nothing"),
    ],
)
def test_contradictions_are_told(line, output):
    with pytest.raises(ConfigError, match=output):
        plan_of(line)


TENSOR = "--tensor-model-parallel-size 2 --checkpoint-activations"


@pytest.mark.parametrize(
    ("line", "world_size", "output"),
    [
        (f"{TENSOR} --sequence-parallel --partition-activations", 2, "--sequence-parallel … part"),
        (
            f"{TENSOR} --pipeline-model-parallel-size 2 --partition-activations "
            "--contiguous-checkpointing",
            4,
            "one micro-batch … pipeline",
        ),
    ],
)
def test_layouts_that_cannot_store_so_are_told(line, world_size, output):
    with problem(output):
        plan_of(line, world_size=world_size)


def test_flags_become_deepspeed_s_block():
    line = f"{TENSOR} --distribute-saved-activations --checkpoint-in-cpu --contiguous-checkpointing"
    block = plan_of(f"{line} --num-layers 5 --checkpoint-num-layers 2", world_size=2).deepspeed
    assert block["activation_checkpointing"] == {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 3,
    }


def test_the_json_serves_many_layouts(tmp_path):
    file = tmp_path / "ds.json"
    keys = {"partition_activations": True, "cpu_checkpointing": False, "profile": True}
    file.write_text(json.dumps({"activation_checkpointing": keys}))
    flags = f"--deepspeed_config {file}"
    decided = plan_of(f"{flags} {TENSOR}", world_size=2)
    assert decided.deepspeed["activation_checkpointing"] == keys
    assert decided.notices == ()

    decided = plan_of(f"{flags} --checkpoint-activations")
    switches = decided.deepspeed["activation_checkpointing"]
    assert switches == keys | {"partition_activations": False}
    (notice,) = decided.notices
    assert notice.startswith("activation_checkpointing.partition_activations of the DeepSpeed JSON")
    assert len(plan_of(flags).notices) == 2


def test_a_flag_against_the_json_is_told(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"activation_checkpointing": {"partition_activations": False}}))
    with problem("activation_checkpointing.partition_activations of the DeepSpeed JSON"):
        plan_of(f"--deepspeed_config {file} {TENSOR} --partition-activations", world_size=2)


@pytest.mark.parametrize(
    ("line", "device", "count"),
    [
        ("--recompute-activations", "cuda", 1),
        ("--recompute-granularity selective --use-flash-attn --bf16", "cuda", 1),
        ("--recompute-activations --attention-impl fused-softmax", "cuda", 0),
        ("--recompute-activations", "cpu", 0),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 1", "cuda", 0),
    ],
)
def test_selective_recomputation_of_attention_without_scores_gets_a_notice(line, device, count):
    notices = plan_of(line, device=device).notices
    assert sum("saves next to no memory" in notice for notice in notices) == count
