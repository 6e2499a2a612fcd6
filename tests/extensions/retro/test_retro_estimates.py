"""Estimates of a network with retrieval."""

import pytest
from tiny import tiny_plan

from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.extensions.retro.layers import retro_layers
from megatron.extensions.retro.objective import RETRO_FIELDS
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.embedding import OutputEmbeddingPipe
from megatron.model.layers.layer_list import Layer
from megatron.model.layers.parts import LayerParts
from megatron.pipeline.stages import entry_names
from megatron.planner.memory import memory_of_stages, weights_of
from megatron.planner.stages import stages_of
from megatron.tensor_parallel.rng import OrdinaryStream


def retro_plan(*flags, **processes):
    sizes = "--num-layers", "9", "--retro-chunk-length", "3"
    return tiny_plan(*sizes, *flags, objective="retro", **processes)


@pytest.mark.parametrize(
    "flags", [(), ("--bf16", "--qk-layernorm"), ("--retro-no-final-norm", "--disable-bias-linear")]
)
def test_weights_and_entries_are_those_of_the_network(flags, group):
    plan = retro_plan(*flags)
    spec, mixed = plan.model, plan.precision.is_mixed
    (stage,) = stages_of(plan)
    steps = retro_layers(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=mixed,
            core_attention=core_attention_of(spec),
            batch_fields=RETRO_FIELDS,
        ),
    )
    names = [(step.cls if isinstance(step, Layer) else step).__name__ for step in steps]
    assert entry_names(spec, mixed=mixed) == names
    layers = [step for step in steps if isinstance(step, Layer)]
    # The head has the table of the embedding.
    built = [step.build() for step in layers if step.cls is not OutputEmbeddingPipe]
    weights = sum(weight.numel() for layer in built for weight in layer.parameters())
    assert weights_of(plan, stage).total == spec.num_parameters == weights


def test_the_encoder_is_on_the_stage_of_the_first_retro_layer():
    plan = retro_plan("--pipeline-model-parallel-size", "3", world_size=3)
    first, second, third = (weights_of(plan, stage).total for stage in stages_of(plan))
    table = plan.model.num_parameters - plan.model.num_parameters_without_embeddings
    assert second > first - table
    assert second > third - table
    assert memory_of_stages(plan)[1].activations > memory_of_stages(plan)[2].activations


def test_more_neighbors_take_more_memory_and_operations():
    few, many = retro_plan(), retro_plan("--retro-num-neighbors", "4")
    assert memory_of_stages(few)[0].activations < memory_of_stages(many)[0].activations
    operations = [plan.model.flops_per_sample(recompute=NOTHING) for plan in (few, many)]
    assert operations[0] < operations[1]
