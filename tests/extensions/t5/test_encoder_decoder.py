"""Estimates of a network with an encoder and a decoder."""

import pytest
from tiny import tiny_plan

from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.extensions.t5.layers import t5_layers
from megatron.extensions.t5.objective import T5_FIELDS
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import Layer
from megatron.model.layers.parts import LayerParts
from megatron.pipeline.stages import entry_names
from megatron.planner.memory import memory_of_stages, weights_of
from megatron.planner.stages import stages_of
from megatron.tensor_parallel.rng import OrdinaryStream

RELATIVE = (
    *("--position-embedding-type", "relative"),
    *("--relative-attention-num-buckets", "4", "--relative-attention-max-distance", "5"),
)


def t5_plan(*flags, world_size=1):
    sizes = ("--num-layers", "4", "--decoder-num-layers", "2", "--decoder-seq-length", "4")
    return tiny_plan(*sizes, *flags, world_size=world_size, objective="t5")


@pytest.mark.parametrize("flags", [(), RELATIVE, ("--bf16",)], ids=["learned", "relative", "bf16"])
def test_weights_and_entries_are_those_of_the_network(flags, group):
    plan = t5_plan(*flags)
    spec, mixed = plan.model, plan.precision.is_mixed
    (stage,) = stages_of(plan)
    assert weights_of(plan, stage).total == spec.num_parameters
    steps = t5_layers(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=mixed,
            core_attention=core_attention_of(spec),
            batch_fields=T5_FIELDS,
        ),
    )
    names = [(step.cls if isinstance(step, Layer) else step).__name__ for step in steps]
    assert entry_names(spec, mixed=mixed) == names


def test_stages_of_a_split():
    """Two stages with two layers of the encoder each, two with a layer of the decoder each."""
    flags = (
        "--pipeline-model-parallel-size",
        "4",
        "--pipeline-model-parallel-split-rank",
        "2",
    )
    stages = stages_of(t5_plan(*flags, world_size=4))
    assert [[*stage.layers] for stage in stages] == [[1, 2], [3, 4], [5], [6]]
    assert [stage.has_embedding for stage in stages] == [True, False, True, False]


def test_a_longer_decoder_takes_more_memory_and_operations():
    short, long = t5_plan(), t5_plan("--decoder-seq-length", "6")
    assert memory_of_stages(short)[0].activations < memory_of_stages(long)[0].activations
    assert short.model.flops_per_sample(recompute=NOTHING) < long.model.flops_per_sample(
        recompute=NOTHING
    )


def test_operations_are_counted_by_hand():
    """Two for each weight and token, and for each feature of each visible key and value; thrice."""
    h, s, d, vocab = 8, 6, 4, 12
    encoder = 4 * (s * 12 * h * h + 2 * h * s * s)
    decoder = 2 * (d * 14 * h * h + s * 2 * h * h + 2 * h * d * (d + s))
    expected = 6 * (encoder + decoder + d * vocab * h)
    assert t5_plan().model.flops_per_sample(recompute=NOTHING) == expected
