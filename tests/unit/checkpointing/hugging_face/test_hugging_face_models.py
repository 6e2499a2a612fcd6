"""Models of transformers' and checkpoints of ours, each made from the other."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from checkpoints import spread_network, whole_weights, write_checkpoint
from safetensors.torch import load_file
from tiny import VOCAB_SIZE, batch_of, tiny_plan
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SiglipVisionConfig,
)

from megatron.checkpointing.hugging_face.families.registry import FAMILIES, family_of
from megatron.checkpointing.hugging_face.model_card import model_card
from megatron.checkpointing.hugging_face.network import load_network, spec_of
from megatron.checkpointing.hugging_face.tensor_mapping import GateUp, QueriesKeysValues
from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import CheckpointError, ConfigError, DataError

TOOLS = Path(__file__).resolve().parents[4] / "tools" / "convert_checkpoint"
SIZES = """
    --num-layers 2 --hidden-size 24 --num-attention-heads 6 --seq-length 10
    --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 10
"""
ROTARY = "--position-embedding-type rotary"
GROUPS = "--group-query-attention --num-query-groups 2"
LLAMA = f"{ROTARY} --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
STRETCHED = "--use-rope-scaling --rope-scaling-factor 4 --rotary-base 500000"
GEMMAS = "--scale-embedding --apply-layernorm-1p --sandwich-norm"
TENSOR, PIPELINE = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"

OURS = {
    "gpt2": ("gpt2", "--ffn-hidden-size 40"),
    "gpt2 erf": ("gpt2", f"--gelu erf {UNTIED} {TENSOR}"),
    "gpt2 squared relu": ("gpt2", f"--squared-relu {PIPELINE}"),
    "bloom": ("bloom", f"--position-embedding-type alibi --embed-layernorm {TENSOR} {PIPELINE}"),
    "bloom after norms": (
        "bloom",
        "--position-embedding-type alibi --embed-layernorm "
        "--apply-residual-connection-post-layernorm",
    ),
    "llama 2": ("llama", f"{LLAMA} --swiglu {UNTIED} {GROUPS} {TENSOR} {PIPELINE}"),
    "llama 3": ("llama", f"{LLAMA} --swiglu --kv-channels 6 {GROUPS} {STRETCHED} {TENSOR}"),
    "llama with biases": (
        "llama",
        f"{ROTARY} --normalization RMSNorm --glu-activation geglu "
        f"--rotary-seq-len-interpolation-factor 2 {PIPELINE}",
    ),
    "mistral": ("mistral", f"{LLAMA} --swiglu {UNTIED} {GROUPS} --window-size 6,0 {TENSOR}"),
    "qwen2": ("qwen2", f"{LLAMA} --swiglu --add-qkv-bias {GROUPS} {TENSOR} {PIPELINE}"),
    "qwen3": ("qwen3", f"{LLAMA} --swiglu --qk-layernorm {GROUPS} --kv-channels 8 {PIPELINE}"),
    "qwen3, windows in front": (
        "qwen3",
        f"{LLAMA} --swiglu --qk-layernorm --window-size 5,0 --window-attn-skip-freq 2 {PIPELINE}",
    ),
    "qwen3 window": ("qwen3", f"{LLAMA} --swiglu --qk-layernorm --window-size 5,0 {UNTIED}"),
    "gpt-neox": ("gpt_neox", f"{ROTARY} --rotary-percent 0.5 --gelu erf {UNTIED} {TENSOR}"),
    "pythia": (
        "gpt_neox",
        f"{ROTARY} --rotary-percent 0.5 --gelu erf --parallel-residual {UNTIED} {TENSOR}",
    ),
    "gpt-neox without biases of attention": (
        "gpt_neox",
        f"{ROTARY} --relu --attention-bias off {UNTIED} {TENSOR}",
    ),
    "gemma": (
        "gemma",
        f"{LLAMA} --glu-activation geglu_tanh --scale-embedding --apply-layernorm-1p "
        f"--kv-channels 8 {GROUPS} {TENSOR}",
    ),
    "gemma 2": (
        "gemma2",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --attn-logit-softcapping 2 "
        f"--final-logit-softcapping 3 --query-pre-attn-scalar 5 --kv-channels 8 {GROUPS} "
        f"--window-size 5,0 --window-attn-skip-freq 2 {TENSOR}",
    ),
    "gemma 2, nothing capped, no window": (
        "gemma2",
        f"{LLAMA} --glu-activation geglu {GEMMAS} --attention-bias on {UNTIED} {PIPELINE}",
    ),
    "gemma 3": (
        "gemma3_text",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm --kv-channels 8 {GROUPS} "
        "--window-size 5,0 --window-attn-skip-freq [1,1,0,1] --num-layers 4 --rotary-base 1e6 "
        f"--rotary-local-base 100 --rotary-seq-len-interpolation-factor 8 {TENSOR} {PIPELINE}",
    ),
    "gemma 3, one base, capped logits": (
        "gemma3_text",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm --window-size 5,0 "
        f"--final-logit-softcapping 3 --query-pre-attn-scalar 9 {UNTIED}",
    ),
    "gemma 3, no window": (
        "gemma3_text",
        f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm {STRETCHED}",
    ),
    "llama with yarn": (
        "llama",
        f"{LLAMA} --swiglu {GROUPS} --use-rope-scaling --rope-scaling-type yarn "
        f"--rope-scaling-factor 4 --rope-original-max-position-embeddings 16 {TENSOR}",
    ),
    "gpt2 relu": ("gpt2", f"--relu {UNTIED}"),
    "llama with biases of attention": (
        "llama",
        f"{LLAMA} --swiglu --attention-bias on {GROUPS} {STRETCHED} --rope-low-freq-factor 0.25 "
        f"--rope-high-freq-factor 20 --rope-original-max-position-embeddings 64 {TENSOR}",
    ),
    "qwen3 with biases of attention": (
        "qwen3",
        f"{LLAMA} --swiglu --qk-layernorm --attention-bias on {TENSOR}",
    ),
    "gpt-neox tied": ("gpt_neox", f"{ROTARY} {PIPELINE}"),
}


def tool(name, *words):
    """Call a tool of convert_checkpoint with these words."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(list(map(str, words)))


@pytest.fixture
def exported(group, tmp_path):
    """Return a function from flags to a network, its checkpoint and the folder of transformers'."""

    def export(flags, *words):
        flags = [*SIZES.split(), *flags.split()]
        plan = tiny_plan(*flags, world_size=4)
        model = spread_network(plan.model, group)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        saved = write_checkpoint(tmp_path / "saved", weights, *flags)
        tool("to_hf", "--load", saved.parent, "--save", tmp_path / "hf", *words)
        return plan.model, model, saved

    return export


def logits_of(model, tokens):
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    with torch.no_grad():
        return model(batch_of(tokens, positions))[..., :VOCAB_SIZE]


def their_logits(folder, tokens, **words):
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **words)
    with torch.no_grad():
        return model.eval()(tokens).logits.float()


def tokens():
    return torch.randint(VOCAB_SIZE, (3, 20), generator=torch.Generator().manual_seed(2))


def rows_with_tokens(weights):
    return {
        name: weight[:VOCAB_SIZE] if name.endswith("word_embeddings.weight") else weight
        for name, weight in weights.items()
    }


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


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
    again = manifest.plan["model"]
    assert (again["vocab_size"], again["padded_vocab_size"]) == (VOCAB_SIZE, VOCAB_SIZE)
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
        "attention_scale",
    ):
        assert getattr(spec_of(again), name) == getattr(spec, name), name

    tool("to_hf", "--load", tmp_path / "back", "--save", tmp_path / "twice", "--no-verify")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "twice" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()


_SMALL = {"vocab_size": 30, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
_GROUPED = {**_SMALL, "intermediate_size": 40, "num_key_value_heads": 2}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_OTHER_LLAMA_3 = {
    **_LLAMA_3,
    "low_freq_factor": 0.5,
    "high_freq_factor": 12.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
THEIRS = {
    "gpt2": GPT2Config(vocab_size=30, n_embd=24, n_layer=2, n_head=4, n_positions=40),
    "bloom": BloomConfig(vocab_size=30, hidden_size=24, n_layer=2, n_head=3),
    "llama 3.1": LlamaConfig(**_GROUPED, rope_parameters=_LLAMA_3, tie_word_embeddings=True),
    "llama": LlamaConfig(**_GROUPED, head_dim=8, attention_bias=True, mlp_bias=True),
    "llama, other constants": LlamaConfig(
        **_GROUPED, rope_parameters=_OTHER_LLAMA_3, attention_bias=True
    ),
    "gemma": GemmaConfig(**_GROUPED, head_dim=8),
    "gemma with biases of attention": GemmaConfig(
        **_GROUPED, head_dim=6, attention_bias=True, tie_word_embeddings=False
    ),
    "gemma 2": Gemma2Config(
        **{**_GROUPED, "num_hidden_layers": 3},
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=5,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
    ),
    "gemma 2, nothing capped": Gemma2Config(
        **_GROUPED,
        head_dim=6,
        query_pre_attn_scalar=6,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * 2,
    ),
    "gemma 3": Gemma3TextConfig(
        **{**_GROUPED, "num_hidden_layers": 7},
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma 3, older keys": Gemma3TextConfig(
        **_GROUPED,
        head_dim=8,
        sliding_window=4,
        query_pre_attn_scalar=11,
        final_logit_softcapping=2.5,
        sliding_window_pattern=2,
        rope_theta=5000.0,
        rope_local_base_freq=70.0,
        tie_word_embeddings=False,
    ),
    "llama, gated by tanh": LlamaConfig(**_GROUPED, hidden_act="gelu_pytorch_tanh"),
    "llama, dynamic": LlamaConfig(
        **_GROUPED,
        max_position_embeddings=25,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    ),
    "llama, yarn": LlamaConfig(**_GROUPED, head_dim=16, rope_parameters=_YARN),
    "qwen3, yarn of other constants": Qwen3Config(
        **_GROUPED,
        head_dim=16,
        rope_parameters={
            **_YARN,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
    ),
    "gpt-neox, yarn of a part": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=40,
        rope_parameters={**_YARN, "partial_rotary_factor": 0.5, "attention_factor": 1.25},
    ),
    "llama, biases of the MLP": LlamaConfig(**_GROUPED, mlp_bias=True),
    "gpt2 relu": GPT2Config(
        vocab_size=30, n_embd=24, n_layer=2, n_head=4, n_positions=40, activation_function="relu"
    ),
    "gpt-neox without biases of attention": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=40,
        attention_bias=False,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "qwen3 with biases of attention": Qwen3Config(**_GROUPED, head_dim=8, attention_bias=True),
    "mistral": MistralConfig(**_GROUPED, sliding_window=7),
    "mistral without window": MistralConfig(**_GROUPED, sliding_window=None),
    "qwen2": Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=0
    ),
    "qwen2, windows behind": Qwen2Config(
        **{**_GROUPED, "num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
    ),
    "qwen3, windows by kind": Qwen3Config(
        **{**_GROUPED, "num_hidden_layers": 4},
        head_dim=8,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3, a window that no layer has": Qwen3Config(
        **_GROUPED,
        head_dim=12,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
    ),
    "gpt-neox": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=40,
        use_parallel_residual=False,
        rope_parameters={"rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    ),
    "pythia": GPTNeoXConfig(
        **_SMALL,
        intermediate_size=96,
        use_parallel_residual=True,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
}


def their_model(config, dtype=torch.float32):
    """Return a random model, with biases and norms that are not all zeros and ones."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


def our_logits(folder, tokens):
    manifest = read_manifest(folder)
    spec = spec_of(manifest.plan["model"])
    with torch.no_grad():
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        return load_network(spec, read_checkpoint(folder, manifest, optimizer=False))(
            batch_of(tokens, positions)
        )


@pytest.mark.parametrize("case", THEIRS)
def test_a_model_of_transformers_is_the_same_here_and_back(group, case, tmp_path, capsys):
    model = their_model(THEIRS[case])
    model.save_pretrained(tmp_path / "hf", max_shard_size="10KB")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours", "--seq-length", 20)
    ids = torch.randint(30, (2, 25), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(ids).logits
    found = our_logits(tmp_path / "ours/global_step0", ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)

    own = ["--model-type", "mistral"] if "mistral" in case else []
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back", "--no-verify", *own)
    tied = model.config.tie_word_embeddings
    weights = model.state_dict()
    heads = {"lm_head.weight", "embed_out.weight"}
    wanted = {name: w for name, w in weights.items() if not (tied and name in heads)}
    found = load_file(tmp_path / "back/model.safetensors")
    for renamed in (found, wanted):  # which name GPT-NeoX's head has depends on the version
        if "embed_out.weight" in renamed:
            renamed["lm_head.weight"] = renamed.pop("embed_out.weight")
    require_equal(found, wanted)


def test_of_a_model_that_reads_images_the_language_model_is_imported(group, tmp_path, capsys):
    torch.manual_seed(3)
    text = THEIRS["gemma 3"].to_dict()
    eyes = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision = SiglipVisionConfig(hidden_size=16, intermediate_size=16, **eyes)
    tokens = {"image_token_index": 27, "boi_token_index": 28, "eoi_token_index": 29}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "hf")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours", "--seq-length", 20)
    said = capsys.readouterr().out
    assert "only the language model" in said and "logits differ by" in said
    ids = torch.randint(27, (2, 25), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = model(ids).logits
    found = our_logits(tmp_path / "ours/global_step0", ids)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back")
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]


def test_rows_that_no_token_uses_are_weights_too(group, tmp_path, capsys):
    model = their_model(THEIRS["gpt2"])
    model.save_pretrained(tmp_path / "hf")
    words = {f"w{i}": i for i in range(20)} | {"[UNK]": 20, "<eos>": 21}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(tmp_path / "hf")
    tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
    said = capsys.readouterr().out
    assert "--true-vocab-size 30 " in said and "--pad-vocab-size-to" not in said
    manifest = read_manifest(tmp_path / "ours/global_step0")
    assert (manifest.plan["model"]["vocab_size"], fast.vocab_size) == (30, 22)
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
    said = capsys.readouterr().out
    assert "--bf16" in said and "--seq-length 40 " in said and "logits differ" not in said
    folder = tmp_path / "ours/global_step0"
    found = whole_weights(folder, read_manifest(folder))
    table = found["tied_modules.embed.word_embeddings.weight"]
    assert torch.equal(table, weights["wte.weight"].float())
    tool("to_hf", "--load", tmp_path / "ours", "--save", tmp_path / "back")
    again = load_file(tmp_path / "back/model.safetensors")
    assert torch.equal(again["transformer.h.1.mlp.c_fc.weight"], weights["h.1.mlp.c_fc.weight"])


_LOCAL_STRETCHED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


def test_what_no_flag_says_is_refused(group, tmp_path):
    for number, (case, changes, told) in enumerate(
        [
            ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True"),
            ("gemma", {"use_bidirectional_attention": True}, "bidirectional_attention is True"),
            ("gemma 3", {"use_bidirectional_attention": True}, "bidirectional_attention is True"),
            ("gemma 3", {"attn_logit_softcapping": 5.0}, "attention_softcap is 5.0"),
            ("gemma 3", {"rope_parameters": _LOCAL_STRETCHED}, "no flag for .* with a window"),
            ("gpt2", {"activation_function": "silu"}, "no flag for the activation silu"),
            (
                "llama",
                {
                    "rope_parameters": {
                        "rope_type": "longrope",
                        "short_factor": [1.0] * 4,
                        "long_factor": [2.0] * 4,
                    }
                },
                "rotary positions of the kind",
            ),
        ]
    ):
        config = THEIRS[case].to_dict() | changes
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        torch.save({}, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=told):
            tool("from_hf", "--load", folder, "--save", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--qk-layernorm", r"GPT2LMHeadModel\):\s+qk_layernorm is True, and it has False"),
        ("--final-logit-softcapping 5", r"logit_softcap is 5.0, and it has 0.0 \(--final-logit-s"),
        (f"{LLAMA} --swiglu --rotary-percent 0.5", "rotary_dim is 2, and it has 4 .--rotary-per"),
        ("--num-experts 2", r"num_experts is \(1, 2\), and it has \(\) \(--num-experts\)"),
    ],
)
def test_a_network_that_no_architecture_expresses_is_refused(flags, told):
    with pytest.raises(CheckpointError, match=told):
        family_of(tiny_plan(*SIZES.split(), *flags.split()).model)


def test_gemma_3_does_not_stretch_positions_in_the_window():
    flags = f"{LLAMA} --glu-activation geglu_tanh {GEMMAS} --qk-layernorm --window-size 5,0"
    stretched = f"{flags} --rotary-seq-len-interpolation-factor 2"
    told = r"rotary_local_base is 0.0, and it has 10000.0 \(--rotary-local-base\)"
    with pytest.raises(CheckpointError, match=told):
        family_of(tiny_plan(*SIZES.split(), *stretched.split()).model, "gemma3_text")


def test_only_gpt_neox_has_parallel_residuals():
    spec = tiny_plan(*SIZES.split(), "--parallel-residual").model
    told = {each.model_type: "\n".join(each.problems(spec)) for each in FAMILIES}
    refused = {name for name, why in told.items() if "(--parallel-residual)" in why}
    assert refused == told.keys() - {"gpt_neox"}


def test_a_conversion_that_computes_something_else_leaves_nothing(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(
        GateUp, "to_hugging_face", lambda self, tensor: (tensor[1::2], tensor[0::2])
    )
    with pytest.raises(CheckpointError, match="different logits(.|\n)*logits differ by"):
        exported(f"{LLAMA} --swiglu {UNTIED}")
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    monkeypatch.undo()
    monkeypatch.setattr(
        QueriesKeysValues, "from_hugging_face", lambda self, tensors: torch.cat(tensors)
    )
    their_model(THEIRS["llama"]).save_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="different logits"):
        tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_in_files_of_bounded_size(exported, tmp_path, dtype):
    words = ["--target-dtype", dtype, "--max-shard-size", "4KB"]
    _, model, _ = exported(f"{LLAMA} --swiglu {UNTIED} --norm-epsilon 1e-5", *words)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = {*index["weight_map"].values()}
    assert len(files) > 5
    assert (
        sum(p.numel() for p in model.parameters()) * 2 - 2 * 24 * 2
        == index["metadata"]["total_size"]
    )
    for file in files:
        held = load_file(tmp_path / "hf" / file)
        assert set(held) == {name for name, where in index["weight_map"].items() if where == file}
        assert len(held) == 1 or sum(w.nbytes for w in held.values()) <= 4000
    found = their_logits(tmp_path / "hf", tokens())
    assert not torch.equal(found, logits_of(model, tokens()))
    torch.testing.assert_close(found, logits_of(model, tokens()), atol=0.05, rtol=0.05)
    card = (tmp_path / "hf/README.md").read_text()
    assert f"transformers in fp32, ours in fp32 with weights in {dtype}: logits differ by" in card
    assert f"transformers in {dtype}, ours in fp32 with weights in fp32: logits differ" in card
    assert "| optimizer steps | 3 |" in card


def test_the_card_says_what_a_prefix_was(exported, tmp_path):
    spec, _, saved = exported("")
    manifest = read_manifest(saved)
    manifest.plan["objective"]["name"] = "prefix-lm"
    parts = {"dtype": "fp32", "measured": [], "tokenizer": "", "chat_template": ""}
    parts["for_release"] = False
    assert "here attention is causal |" in model_card(manifest, spec, family_of(spec), **parts)
    assert "attention is causal" not in (tmp_path / "hf/README.md").read_text()


def test_norms_around_one_become_ordinary_ones(exported, tmp_path):
    _, model, _ = exported("--apply-layernorm-1p")
    found = load_file(tmp_path / "hf/model.safetensors")["transformer.h.0.ln_1.weight"]
    assert torch.equal(found, model.state_dict()["3.input_layernorm.weight"] + 1)


def test_what_is_there_is_not_replaced(exported, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/file").touch()
    with pytest.raises(CheckpointError, match="holds something already"):
        exported("")
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        tool("from_hf", "--load", tmp_path / "hf", "--save", tmp_path / "saved")
    words = ["--load", tmp_path / "saved", "--save", tmp_path / "new"]
    with pytest.raises(DataError, match="has 5 tokens and the network was trained with 11"):
        tool("to_hf", *words, "--vocab-size", 4)
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    with pytest.raises(
        DataError, match="goes with a tokenizer, .*none is written: transformers has"
    ):
        tool("to_hf", *words, "--chat-template", tmp_path / "chat.jinja")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="--max-shard-size 5XB is not a size"):
        tool("to_hf", *words, "--max-shard-size", "5XB")


@pytest.mark.parametrize("name", ["from_hf", "to_hf"])
def test_a_folder_that_is_not_there_is_told(name, tmp_path):
    with pytest.raises(CheckpointError, match="none does not exist"):
        tool(name, "--load", tmp_path / "none", "--save", tmp_path / "new")


def test_the_words_of_older_scripts(exported, tmp_path):
    _, _, saved = exported("")
    words = ["--input_folder", saved, "--output_folder", tmp_path / "old"]
    with pytest.raises(ConfigError, match="--target_tp 2: files of transformers"):
        tool("deepspeed_to_transformers", *words, "--target_tp", 2)
    tool("deepspeed_to_transformers", *words, "--for_release")
    file = "model.safetensors"
    assert (tmp_path / "old" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
    assert "optimizer steps" not in (tmp_path / "old/README.md").read_text()
