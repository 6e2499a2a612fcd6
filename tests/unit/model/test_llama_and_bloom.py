"""Networks of Llama's and BLOOM's shape against Hugging Face's models with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_plan
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron.model.gpt import gpt_layers
from megatron.model.init import initialise
from megatron.model.layers import SequentialModel
from megatron.model.positions import rotary_frequencies
from megatron.parallel.random import OrdinaryStream

SIZES = """
    --num-layers 3 --hidden-size 24 --ffn-hidden-size 40 --num-attention-heads 6 --kv-channels 8
    --seq-length 10 --attention-dropout 0 --hidden-dropout 0
"""
LLAMA_2 = """
    --use-rotary-position-embeddings --no-position-embedding --normalization RMSNorm
    --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 2 --max-position-embeddings 4096
"""
LLAMA_3 = f"{LLAMA_2} --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8"
BLOOM = "--position-embedding-type alibi --embed-layernorm --kv-channels 4"
HEADS, GROUPS, HEAD_DIM, LAYERS, VOCAB = 6, 2, 8, 3, 12


def network(group, flags):
    spec = tiny_plan(*SIZES.split(), *flags.split()).model
    model = SequentialModel(gpt_layers(spec, group=group, rng=OrdinaryStream(), mixed=False))
    initialise(model, seed=1, std=0.2, num_layers=LAYERS)
    torch.manual_seed(1)
    with torch.no_grad():  # biases and norms that are not all zeros and ones
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return spec, model


def hugging_face_llama(**changes):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            head_dim=HEAD_DIM,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            **changes,
        )
    ).eval()


def as_llama(weights):
    """Rename and take apart: their queries, keys, values, gates and ups are matrices each."""
    renamed = {
        "model.embed_tokens.weight": weights["1.word_embeddings.weight"],
        "model.norm.weight": weights[f"{LAYERS + 4}.weight"],
        "lm_head.weight": weights[f"{LAYERS + 5}.word_embeddings.weight"],
    }
    queries = HEADS // GROUPS
    for layer in range(LAYERS):
        own, theirs = f"{3 + layer}", f"model.layers.{layer}"
        qkv = weights[f"{own}.self_attention.query_key_value.weight"]
        by_group = qkv.view(GROUPS, queries + 2, HEAD_DIM, -1)
        inner = weights[f"{own}.mlp.dense_h_to_4h.weight"]
        renamed |= {
            f"{theirs}.self_attn.q_proj.weight": by_group[:, :queries].flatten(0, 2),
            f"{theirs}.self_attn.k_proj.weight": by_group[:, queries].flatten(0, 1),
            f"{theirs}.self_attn.v_proj.weight": by_group[:, queries + 1].flatten(0, 1),
            f"{theirs}.self_attn.o_proj.weight": weights[f"{own}.self_attention.dense.weight"],
            f"{theirs}.mlp.gate_proj.weight": inner[0::2],
            f"{theirs}.mlp.up_proj.weight": inner[1::2],
            f"{theirs}.mlp.down_proj.weight": weights[f"{own}.mlp.dense_4h_to_h.weight"],
            f"{theirs}.input_layernorm.weight": weights[f"{own}.input_layernorm.weight"],
            f"{theirs}.post_attention_layernorm.weight": weights[
                f"{own}.post_attention_layernorm.weight"
            ],
        }
    return renamed


def hugging_face_bloom():
    config = BloomConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        n_layer=LAYERS,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return BloomForCausalLM(config).eval()


def as_bloom(weights):
    """Rename alone: BLOOM was trained with these layouts. Its MLP is four times as wide."""
    embed, last = "tied_modules.embed.word_embeddings", f"{LAYERS + 4}"
    renamed = {
        "transformer.word_embeddings.weight": weights[f"{embed}.weight"],
        "lm_head.weight": weights[f"{embed}.weight"],
    }
    for part in ("weight", "bias"):
        norm = weights[f"{embed}.norm.{part}"]
        renamed[f"transformer.word_embeddings_layernorm.{part}"] = norm
        renamed[f"transformer.ln_f.{part}"] = weights[f"{last}.{part}"]
    for name, weight in weights.items():
        number, _, rest = name.partition(".")
        if number.isdigit() and number != last:
            renamed[f"transformer.h.{int(number) - 3}.{rest}"] = weight
    return renamed


CASES = {
    "llama 2": (LLAMA_2, hugging_face_llama, as_llama),
    "llama 3.1": (
        LLAMA_3,
        lambda: hugging_face_llama(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        ),
        as_llama,
    ),
    "bloom": (f"{BLOOM} --ffn-hidden-size 96", hugging_face_bloom, as_bloom),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_hugging_face(group, case):
    flags, build, renamed = CASES[case]
    _, model = network(group, flags)
    reference = build()
    missing, unexpected = reference.load_state_dict(renamed(model.state_dict()), strict=False)
    assert (missing, unexpected) == ([], [])
    tokens = torch.randint(VOCAB, (3, 10))
    positions = torch.arange(10).expand_as(tokens)
    logits, expected = model((tokens, positions)), reference(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    for prediction in (logits, expected):
        F.cross_entropy(prediction.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    own = renamed({name: p.grad for name, p in model.named_parameters()})
    assert set(theirs) == set(own) - ({"lm_head.weight"} if case == "bloom" else set())
    for name, gradient in theirs.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama 2", "llama 3.1"])
def test_frequencies_are_those_of_hugging_face(group, case):
    flags, build, _ = CASES[case]
    spec, _ = network(group, f"{flags} --kv-channels 128")
    config = build().config
    config.head_dim = 128
    rotary = type(build().model.rotary_emb)(config)
    torch.testing.assert_close(
        rotary_frequencies(spec, torch.device("cpu")), rotary.inv_freq, atol=0, rtol=1e-5
    )
