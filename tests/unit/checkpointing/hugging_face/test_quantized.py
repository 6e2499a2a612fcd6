"""Quantized weights of transformers models: MXFP4 is decoded on import, other methods are refused."""

import json

import gpt_oss
import pytest
import torch
from architectures import tool
from safetensors.torch import load_file, save_file
from tiny import batch_of
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.hugging_face.quantized import decode_mxfp4
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import CheckpointError


def random_blocks(experts, rows, columns):
    blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(120, 127, (experts, rows, columns // 32), dtype=torch.uint8)


def test_blocks_are_decoded_as_transformers_does():
    torch.manual_seed(0)
    blocks, scales = random_blocks(3, 6, 96)
    scales[0, 0] = torch.tensor([0, 127, 250])
    found = decode_mxfp4(blocks, scales).mT
    assert torch.equal(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    values = decode_mxfp4(
        torch.tensor([0x21, 0xF8] * 8).byte()[None, None, None], scales[:1, :1, 1:2]
    )
    assert values[0, 0, :4].tolist() == [0.5, 1.0, -0.0, -6.0]


def quantized_folder(folder):
    """Write a model whose experts are quantized; return the model with the decoded values."""
    sizes = gpt_oss.SIZES | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, sliding_window=4)).eval()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = weights.pop(name).shape
        blocks, scales = random_blocks(experts, rows, columns)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data.copy_(decoded)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def with_method(folder, method):
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}
    file.write_text(json.dumps(config))


def test_experts_in_mxfp4_are_imported(group, tmp_path, capsys):
    torch.manual_seed(0)
    model = quantized_folder(tmp_path / "hf")
    with_method(tmp_path / "hf", "mxfp4")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours", "--seq-length", 20)
    ids = torch.randint(30, (2, 25))
    with torch.no_grad():
        expected = model(ids).logits
    folder = tmp_path / "ours/global_step0"
    manifest = read_manifest(folder)
    own = load_network(manifest.spec, read_checkpoint(folder, manifest, optimizer=False))
    with torch.no_grad():
        found = own(batch_of(ids, torch.arange(25).expand_as(ids)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back")
    again = load_file(tmp_path / "back/model.safetensors")
    for name, weight in model.state_dict().items():
        assert torch.equal(again[name], weight), name


def test_weights_of_another_method_are_refused(group, tmp_path):
    quantized_folder(tmp_path / "hf")
    with_method(tmp_path / "hf", "gptq")
    with pytest.raises(CheckpointError, match="quantized by gptq, and mxfp4 alone"):
        tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
