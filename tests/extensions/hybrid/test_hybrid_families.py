"""Hybrid networks of transformers: the same logits, gradients and decode steps here, the same files back."""

import json
from pathlib import Path

import pytest
import torch
from architectures import tool
from families import spec_of, their_model
from family_ranks import compare_families
from hybrids import CASES
from ranks import run_on_ranks
from safetensors.torch import load_file, save_file
from same_model import require_same_model

from megatron.common.errors import CheckpointError


@pytest.mark.parametrize("case", CASES)
def test_a_hybrid_of_transformers_is_the_same_here_and_back(group, case, tmp_path, capsys):
    require_same_model(their_model(CASES[case]), tmp_path)
    assert "image encoder" not in capsys.readouterr().out


@pytest.mark.parametrize("case", ["nemotron-h", "qwen3-next"])
def test_layers_of_multi_token_prediction_in_files_are_left_out(group, case, tmp_path, capsys):
    their_model(CASES[case]).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    extra = {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.norm.weight": torch.ones(2)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours", "--with-mtp")
    notice = "multi-token prediction were left out: they are not built for a"
    assert notice in capsys.readouterr().out


def test_two_ranks_compute_what_one_process_computes(tmp_path: Path) -> None:
    specs = {name: spec_of(config, tmp_path / name)[1] for name, config in CASES.items()}
    run_on_ranks(2, compare_families, tmp_path, specs, torch.float64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_bias", True),
        ("use_conv_bias", False),
        ("mamba_hidden_act", "gelu"),
        ("moe_latent_size", 8),
        ("time_step_min", 0.01),
    ],
)
def test_options_that_are_not_built_are_refused_by_name(group, tmp_path, name, value, capsys):
    config = CASES["nemotron-h"]
    their_model(config).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    words = ["--load", tmp_path / "hf", "--save", tmp_path / "ours", "--no-verify"]
    if name == "time_step_min":
        tool("from_hf", *words)
        assert f"--mamba-dt-min {value}" in capsys.readouterr().out
        return
    with pytest.raises((CheckpointError, SystemExit)) as refused:
        tool("from_hf", *words)
    assert name in str(refused.value) + capsys.readouterr().err
