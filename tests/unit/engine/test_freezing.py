"""--freeze: what it matches, what estimates count, and what is refused."""

import pytest
from networks import gpt_steps
from problems import problem
from tiny import tiny_plan
from torch import nn

from megatron.checkpointing.parameter_names import ParameterNames
from megatron.common.errors import ConfigError
from megatron.engine.freezing import freeze
from megatron.model.layers.layer_list import SequentialModel
from megatron.planner.memory import memory_of_stages
from megatron.planner.stages import stages_of
from megatron.tensor_parallel.rng import OrdinaryStream

UNTIED = "--untie-embeddings-and-output-weights"


def frozen_model(group, *flags):
    decided = tiny_plan(*flags)
    model = SequentialModel(
        gpt_steps(decided.model, group=group, rng=OrdinaryStream(), mixed=False)
    )
    names = ParameterNames.of(decided.model).module
    lora = decided.model.lora
    freeze(model, decided.optimizer, names, adapters_only=lora is not None)
    return decided, {names(name): p for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("flags", "frozen"),
    [
        (r"--freeze ^embedding", r"embedding."),
        (rf"{UNTIED} --freeze ^output", "output_layer."),
        (rf"{UNTIED} --freeze ^embedding layers\.0\. final", "embedding. layers.0. final_"),
        (r"--freeze layers\.1\.mlp", "layers.1.mlp."),
        (r"--freeze self_attention --freeze final", "layers.0.self_ layers.1.self_ final_"),
    ],
)
def test_estimates_count_the_frozen_modules(group, flags, frozen):
    decided, parameters = frozen_model(group, *flags.split())
    trained = {name for name, p in parameters.items() if p.requires_grad}
    assert trained == {name for name in parameters if not name.startswith((*frozen.split(),))}
    (stage,) = stages_of(decided)
    assert stage.trained.total == sum(parameters[name].numel() for name in trained)
    (memory,) = memory_of_stages(decided)
    assert memory.weights == 4 * decided.model.num_parameters
    assert (memory.gradients, memory.optimizer) == (
        4 * stage.trained.total,
        8 * stage.trained.total,
    )


def test_a_pattern_of_single_parameters_freezes_them(group):
    decided, parameters = frozen_model(group, "--freeze", r"_h\.bias$")
    assert [name for name, p in parameters.items() if not p.requires_grad] == [
        f"layers.{number}.mlp.dense_4h_to_h.bias" for number in (0, 1)
    ]
    # Memory is counted by modules, and of these none is frozen.
    (stage,) = stages_of(decided)
    assert stage.trained == stage.weights


def test_biases_and_adapters_may_be_frozen_too(group):
    _, parameters = frozen_model(group, "--bitfit", "--freeze", r"layers\.0")
    trained = [name for name, p in parameters.items() if p.requires_grad]
    assert trained
    assert all(n.endswith("bias") and not n.startswith("layers.0.") for n in trained)
    _, parameters = frozen_model(group, "--lora-rank", "2", "--freeze", r"layers\.0")
    assert [name for name, p in parameters.items() if p.requires_grad] == [
        f"layers.1.self_attention.query_key_value.lora_{part}" for part in "AB"
    ]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("dense_4h_to_h.wieght", "matches no parameter … layers.0.mlp.dense_4h_to_h.weight"),
        ("embeding", "matches no parameter … embedding.word_embeddings.weight"),
        ("", "leaves nothing to train"),
        ("layers.(0", "layers.(0 … regular expression"),
    ],
)
def test_a_useless_pattern_is_refused(group, pattern, message):
    with problem(f"--freeze … {message}", ConfigError):
        frozen_model(group, "--freeze", pattern)


def test_a_stage_without_adapters_trains_nothing_where_others_have_them(group):
    decided, parameters = frozen_model(group)
    model = nn.ParameterDict({name.replace(".", "_"): p for name, p in parameters.items()})
    freeze(model, decided.optimizer, adapters_only=True)
    assert not any(p.requires_grad for p in model.parameters())
