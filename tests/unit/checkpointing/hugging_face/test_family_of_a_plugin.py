"""An architecture of transformers that a plugin registers is written and read like those of the package."""

import json
from pathlib import Path

import pytest
import torch
from architectures import SIZES, tool
from problems import problem
from scripts import forget_plugin
from tiny import tiny_plan

from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import CheckpointError
from megatron.common.registry import FAMILIES

PLUGIN = str(Path(__file__).parents[4] / "examples" / "hugging_face_family" / "starcoder2.py")
FLAGS = "--position-embedding-type rotary --gelu tanh --group-query-attention --num-query-groups 2"


@pytest.fixture(autouse=True)
def forgotten():
    yield
    forget_plugin("starcoder2", FAMILIES, "starcoder2")


def test_without_the_plugin_no_architecture_expresses_the_network():
    with problem("GPTNeoXForCausalLM … 2 … 6 … --num-query-groups", CheckpointError):
        family_of(tiny_plan(*SIZES.split(), *FLAGS.split(), world_size=4).model)


def test_its_network_is_written_and_read(exported, tmp_path):
    _, _, saved = exported(FLAGS, "--plugin", PLUGIN)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["architectures"] == ["Starcoder2ForCausalLM"]
    assert config["num_key_value_heads"] == 2
    tool("from_hf", "--plugin", PLUGIN, "--load", tmp_path / "hf", "--save", tmp_path / "back")
    ours, back = (
        read_checkpoint(folder, read_manifest(folder), optimizer=False).parameters
        for folder in (saved, checkpoint_of(tmp_path / "back"))
    )
    assert [*ours] == [*back]
    for name in ours:
        kept = back[name].weight.all()
        assert torch.equal(kept, ours[name].weight.all()[: len(kept)]), name


def test_its_adapters_are_written(exported, tmp_path):
    lora = "--lora-rank 2 --lora-target-modules c_attn"
    _, _, saved = exported(f"{FLAGS} {lora}", "--plugin", PLUGIN)
    words = ("--plugin", PLUGIN, "--load", saved, "--save", tmp_path / "adapters")
    tool("lora_to_peft", *words)
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()
