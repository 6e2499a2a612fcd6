"""Layers of multi-token prediction in transformers' files, in both directions."""

from copy import deepcopy

import pytest
import torch
from architectures import THEIRS, require_equal, tool
from checkpoints import whole_weights
from families import require_close, sample, their_model
from networks import gpt_steps
from safetensors.torch import load_file, save_file
from tiny import batch_of
from transformers.modeling_layers import MtpLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

from megatron.checkpointing.manifest import read_manifest
from megatron.common.errors import CheckpointError
from megatron.model.layers.layer_list import SequentialModel

LAYERS = 3
COPIES = "embed_tokens.weight", "shared_head.head.weight"


def drawn(layer):
    with torch.no_grad():
        for tensor in [*layer.parameters(), *layer.buffers()]:
            wide = tensor.dim() > 1
            tensor.copy_(0.2 * torch.randn_like(tensor) + (0 if wide else 1))
    return layer.eval()


def in_files(layer, prefix):
    """Return the tensors of a layer as in published files: each expert's by its number."""
    renamed = {"post_norm.weight": "shared_head.norm.weight"}
    for name, tensor in layer.state_dict().items():
        name = renamed.get(name, name.removeprefix("mtp_block."))
        for number, expert in enumerate(tensor if "mlp.experts.gate_up" in name else ()):
            gate, up = expert.chunk(2)
            yield f"{prefix}mlp.experts.{number}.gate_proj.weight", gate
            yield f"{prefix}mlp.experts.{number}.up_proj.weight", up
        for number, expert in enumerate(tensor if "mlp.experts.down" in name else ()):
            yield f"{prefix}mlp.experts.{number}.down_proj.weight", expert
        if "mlp.experts." not in name:
            yield prefix + name, tensor


@pytest.fixture
def published(tmp_path):
    """Return a model with two depths, these, and the tensors of its files but the copies."""
    config = deepcopy(THEIRS["deepseek-moe with groups"])
    config.num_nextn_predict_layers = 2
    main = their_model(config)
    main.save_pretrained(tmp_path / "hf")
    config._attn_implementation = "eager"
    depths = [
        drawn(MtpLayer(config, Glm4MoeDecoderLayer, Glm4MoeRMSNorm, LAYERS - 1)) for _ in "12"
    ]
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    for number, depth in enumerate(depths, LAYERS):
        tensors |= dict(in_files(depth, f"model.layers.{number}."))
    copies = {f"model.layers.{LAYERS}.{name}": tensors["lm_head.weight"] for name in COPIES}
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors | {n: w.clone() for n, w in copies.items()}, file, {"format": "pt"})
    return main, depths, tensors


def imported(folder, *flags):
    tool("from_hf", "--load", folder / "hf", "--save", folder / "ours", "--seq-length", 20, *flags)
    return folder / "ours/global_step0"


@torch.no_grad()
def test_all_depths_are_those_of_transformers_and_come_back(published, group, tmp_path, capsys):
    main, depths, tensors = published
    folder = imported(tmp_path, "--with-mtp")
    manifest = read_manifest(folder)
    model = SequentialModel(gpt_steps(manifest.spec, group=group)).eval()
    model.load_state_dict(whole_weights(folder, manifest))

    ids = sample()
    positions = torch.arange(20).expand_as(ids)
    hidden = main.model(ids).last_hidden_state
    rotary = main.model.rotary_emb(hidden, positions)
    mask = torch.full((20, 20), float("-inf")).triu(1)[None, None]
    expected = [main.lm_head(hidden)]
    for number, depth in enumerate(depths, 1):
        embedded = main.model.embed_tokens(ids.roll(-number, 1))
        hidden = depth(embedded, hidden, rotary, mask, positions, None)
        expected.append(main.lm_head(hidden))
    require_close(model(batch_of(ids, positions)), torch.cat(expected))

    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back")
    require_equal(load_file(tmp_path / "back/model.safetensors"), tensors)


def test_without_flags_files_are_imported_and_exported_without_them(published, tmp_path, capsys):
    _, _, tensors = published
    alone = {
        n: w for n, w in tensors.items() if not n.startswith(("model.layers.3", "model.layers.4"))
    }
    assert read_manifest(imported(tmp_path)).spec.prediction is None
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back", "--no-verify")
    require_equal(load_file(tmp_path / "back/model.safetensors"), alone)


def test_an_export_can_leave_them_out(published, tmp_path, capsys):
    _, _, tensors = published
    alone = {
        n: w for n, w in tensors.items() if not n.startswith(("model.layers.3", "model.layers.4"))
    }
    assert read_manifest(imported(tmp_path, "--with-mtp")).spec.prediction
    with pytest.raises(CheckpointError, match="prediction_depths is 2"):
        tool(
            *("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "other"),
            *("--model-type", "dots1"),
        )
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back", "--without-mtp")
    require_equal(load_file(tmp_path / "back/model.safetensors"), alone)
