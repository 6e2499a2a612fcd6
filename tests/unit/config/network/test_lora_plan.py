"""Which layers get adapters, and what is refused."""

import pytest
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.config.network.lora import lora_targets
from megatron.config.network.spec_part import LINEAR_LAYERS
from megatron.config.plan.validation import validate


@pytest.mark.parametrize(
    ("output", "layers"),
    [
        (None, ("query_key_value",)),
        (["all-linear"], LINEAR_LAYERS),
        (["down_proj", "v_proj", "q_proj", "k_proj"], ("query_key_value", "dense_4h_to_h")),
        (["c_proj"], ("dense", "dense_4h_to_h")),
        (["dense"], ("dense",)),
    ],
)
def test_layers_have_the_names_of_other_models(output, layers):
    assert lora_targets(output) == layers


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lora-rank -1", "--lora-rank -1 must be at least 0"),
        ("--lora-alpha 2", "--lora-alpha is of adapters: give --lora-rank"),
        ("--lora-target-modules dense", "--lora-target-modules is of adapters: give --lora-rank"),
        ("--lora-rank 2 --lora-alpha 0", "--lora-alpha 0.0 must be more than 0"),
        ("--lora-rank 2 --lora-dropout 1", "--lora-dropout 1.0 must be at least 0 and less"),
        ("--lora-rank 2 --bitfit", "--lora-rank and --bitfit exclude each other"),
        ("--lora-rank 2 --num-experts 2", "--lora-rank and --num-experts exclude each other"),
        ("--lora-rank 2 --lora-target-modules lm_head", "lm_head is not a linear layer; known are"),
        ("--lora-rank 2 --lora-target-modules q_proj v_proj", "adapter: name k_proj too"),
    ],
)
def test_what_cannot_be_built_is_refused(line, message):
    with problem(message):
        validate(tiny_config(*line.split()), world_size=1, device="cpu")


def test_an_adapter_counts_once_when_nothing_is_said():
    assert tiny_plan("--lora-rank", "4").model.lora.scale == 1
    assert tiny_plan("--lora-rank", "4", "--lora-alpha", "8").model.lora.scale == 2
