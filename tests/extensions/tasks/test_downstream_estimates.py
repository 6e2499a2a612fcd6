"""Estimates of networks with the head of a downstream task."""

import pytest
from tiny import tiny_plan

from megatron.common.registry import OBJECTIVES
from megatron.extensions.tasks.flags import objective_of
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import Layer
from megatron.model.layers.parts import LayerParts
from megatron.pipeline.stages import entry_names
from megatron.planner.memory import memory_of_stages, weights_of
from megatron.planner.stages import stages_of
from megatron.tensor_parallel.rng import OrdinaryStream


def plan_of(task, architecture="bert", *flags):
    words = ("--task", task, "--train-data", "a", *flags)
    return tiny_plan(
        *words, without=("--data-path",), objective=objective_of(task, causal=architecture == "gpt")
    )


@pytest.mark.parametrize(
    ("task", "architecture", "flags"),
    [
        ("MNLI", "bert", ("--bf16",)),
        ("RACE", "bert", ()),
        ("MNLI", "gpt", ("--untie-embeddings-and-output-weights",)),
        ("RACE", "gpt", ("--bf16",)),
        ("token-classification", "bert", ("--labels", "O", "B")),
    ],
)
def test_weights_and_entries_are_those_of_the_network(task, architecture, flags, group):
    plan = plan_of(task, architecture, *flags)
    spec, mixed = plan.model, plan.precision.is_mixed
    steps = OBJECTIVES.get(plan.objective.name)().layers(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=mixed,
            core_attention=core_attention_of(spec),
            batch_fields=(),
        ),
    )
    names = [(step.cls if isinstance(step, Layer) else step).__name__ for step in steps]
    assert entry_names(spec, mixed=mixed) == names
    built = [step.build() for step in steps if isinstance(step, Layer)]
    weights = sum(weight.numel() for layer in built for weight in layer.parameters())
    (stage,) = stages_of(plan)
    assert weights_of(plan, stage).total == spec.num_parameters == weights


@pytest.mark.parametrize("architecture", ["bert", "gpt"])
def test_a_question_takes_the_memory_of_its_four_choices(architecture):
    four = plan_of("STS-B", architecture, "--micro-batch-size", "4")
    one = plan_of("RACE", architecture, "--micro-batch-size", "1")
    assert memory_of_stages(one) == memory_of_stages(four)
