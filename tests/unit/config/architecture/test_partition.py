"""Pipelines are divided by transformer layers, whatever the name of their class."""

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.config.architecture.architecture import Entry, network_of
from megatron.config.architecture.partition import stage_bounds
from megatron.planner.memory import memory_of_stages
from megatron.planner.stages import stages_of

STAGES = "--pipeline-model-parallel-size"
METHOD = "--pp-partition-method"


def entries_of(block):
    spec = tiny_plan("--num-layers", "4").model
    entries = network_of(spec).entries(spec)
    return [Entry(name=block, kind="block") if each.kind == "block" else each for each in entries]


@pytest.mark.parametrize("method", ["type:transformer", "type:transformer|embedding"])
def test_layers_count_whatever_their_name(method):
    usual = stage_bounds(method, entries_of("ParallelTransformerLayerPipe"), 2)
    assert stage_bounds(method, entries_of("GatedMixer"), 2) == usual == [0, 5, 10]


def test_a_name_of_a_class_is_matched_too():
    entries = entries_of("GatedMixer")
    assert stage_bounds("type:gatedmixer", entries, 4) == [0, 4, 5, 6, 10]


def test_a_pattern_without_a_match_lists_the_classes():
    with problem("matches no layer … EmbeddingPipe, GatedMixer"):
        stage_bounds("type:mamba", entries_of("GatedMixer"), 2)
    with problem("type:transformer matches"):
        tiny_plan(STAGES, "2", METHOD, "type:mamba", world_size=2)


def test_stages_are_counted_in_the_units_of_the_method():
    both = (METHOD, "type:transformer|embedding")
    plan = tiny_plan(STAGES, "4", *both, "--embed-layernorm", world_size=4)
    stages = stages_of(plan)
    assert [stage.layers for stage in stages] == [(), (1,), (2,), ()]
    assert stages[0].has_embedding and stages[3].has_final_norm and stages[3].has_head
    assert all(memory.total > 0 for memory in memory_of_stages(plan))
    with problem("5 stages … 4 layers"):
        tiny_plan(STAGES, "5", *both, world_size=5)
    with problem("4 is more than --num-layers 2"):
        tiny_plan(STAGES, "4", world_size=4)


@pytest.mark.parametrize("flags", [("--lora-rank", "2"), ("--bitfit",)])
def test_what_trains_layers_in_a_way_of_their_own_needs_one_on_each_stage(flags):
    with problem("a layer to train on each stage"):
        tiny_plan(STAGES, "4", METHOD, "type:transformer|embedding", *flags, world_size=4)
