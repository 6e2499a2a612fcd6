"""Import and export of transformers models: weights and logits, in both directions."""

import json

import pytest
import torch
from architectures import (
    OURS,
    THEIRS,
    logits_of,
    require_equal,
    rows_with_tokens,
    their_logits,
    tokens,
    tool,
)
from checkpoints import whole_weights
from families import logits_and_gradients, require_close, their_model
from safetensors.torch import load_file, save_file
from same_model import require_same_model
from tiny import VOCAB_SIZE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from megatron.checkpointing.conversion.network import load_network
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.config.network.model_spec import flat


@pytest.mark.parametrize("case", OURS)
def test_a_network_is_the_same_in_transformers_and_back(case, exported, tmp_path, capsys):
    family, flags = OURS[case]
    spec, model, saved = exported(flags)
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == family
    expected = logits_of(model, tokens())
    torch.testing.assert_close(
        their_logits(tmp_path / "hf", tokens()), expected, atol=1e-5, rtol=1e-5
    )
    # Every weight is compared here, so that the tools need not run the models again.
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "back", "--no-verify")
    back = tmp_path / "back" / "global_step0"
    manifest = read_manifest(back)
    found = whole_weights(back, manifest)
    require_equal(found, rows_with_tokens(whole_weights(saved, read_manifest(saved))))
    again = manifest.spec
    sizes = again.vocabulary.vocab_size, again.vocabulary.padded_vocab_size
    assert sizes == (VOCAB_SIZE, VOCAB_SIZE)
    for name in (
        "activation",
        "window",
        "full_attention_layers",
        "rotary_dim",
        "rope_scaling",
        "num_query_groups",
        "parallel_residual",
        "sandwich_norm",
        "attention_softcap",
    ):
        assert flat(again)[name] == flat(spec)[name], name
    assert again.attention.scale == spec.attention.scale

    tool("to_hf", "--load", tmp_path / "back", "--save", tmp_path / "twice", "--no-verify")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "twice" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


@pytest.mark.parametrize("case", THEIRS)
def test_a_model_of_transformers_is_the_same_here_and_back(group, case, tmp_path, capsys):
    model = their_model(THEIRS[case])
    require_same_model(model, tmp_path)


def test_layers_of_multi_token_prediction_are_left_out_with_a_notice(group, tmp_path, capsys):
    their_model(THEIRS["deepseek v3"]).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    weights = load_file(file)
    save_file({**weights, "model.layers.3.eh_proj.weight": torch.ones(24, 48)}, file)
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours", "--no-verify")
    assert "multi-token prediction were left out: --with-mtp" in capsys.readouterr().out


def test_the_language_model_of_a_multimodal_one_is_imported(group, tmp_path, capsys):
    torch.manual_seed(3)
    text = THEIRS["gemma 3"].to_dict()
    eyes = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision = SiglipVisionConfig(hidden_size=16, intermediate_size=16, **eyes)
    tokens = {"image_token_index": 27, "boi_token_index": 28, "eoi_token_index": 29}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "hf")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours", "--seq-length", 20)
    printed = capsys.readouterr().out
    assert "only the language model" in printed and "logits differ by" in printed
    ids = torch.randint(27, (2, 25), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(ids).logits
    manifest = read_manifest(tmp_path / "ours/global_step0")
    checkpoint = read_checkpoint(tmp_path / "ours/global_step0", manifest, optimizer=False)
    require_close(logits_and_gradients(load_network(manifest.spec, checkpoint), ids)[0], expected)
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back")
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]


def test_rows_without_a_token_are_kept(group, tmp_path, capsys):
    model = their_model(THEIRS["gpt2"])
    model.save_pretrained(tmp_path / "hf")
    words = {f"w{i}": i for i in range(20)} | {"[UNK]": 20, "<eos>": 21}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(tmp_path / "hf")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
    printed = capsys.readouterr().out
    assert "--true-vocab-size 30 " in printed and "--pad-vocab-size-to" not in printed
    manifest = read_manifest(tmp_path / "ours/global_step0")
    assert (manifest.spec.vocabulary.vocab_size, fast.vocab_size) == (30, 22)
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["vocab_size"] == 30
    require_equal(
        load_file(tmp_path / "back/model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    )


def test_older_files_without_prefix_and_with_constants_are_read(group, tmp_path, capsys):
    model = their_model(THEIRS["gpt2"], torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/model.safetensors").unlink()
    weights = {n.removeprefix("transformer."): w for n, w in model.state_dict().items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    torch.save(weights, tmp_path / "hf/pytorch_model.bin")
    words = ["--load", tmp_path / "hf", "--save", tmp_path / "ours", "--no-verify"]
    tool("from_hf", *words)
    printed = capsys.readouterr().out
    assert "--bf16" in printed and "--seq-length 40 " in printed and "logits differ" not in printed
    folder = tmp_path / "ours/global_step0"
    found = whole_weights(folder, read_manifest(folder))
    table = found["tied_modules.embed.word_embeddings.weight"]
    assert torch.equal(table, weights["wte.weight"].float())
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back")
    again = load_file(tmp_path / "back/model.safetensors")
    assert torch.equal(again["transformer.h.1.mlp.c_fc.weight"], weights["h.1.mlp.c_fc.weight"])
