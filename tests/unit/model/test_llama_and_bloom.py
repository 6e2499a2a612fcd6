"""Networks of Llama's, Gemma's and BLOOM's shape against Hugging Face's models with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import in_transformers, spread_network
from tiny import batch_of, tiny_plan
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from megatron.model.layers.positions import rotary_frequencies

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
GEMMA = """
    --use-rotary-position-embeddings --no-position-embedding --normalization RMSNorm
    --norm-epsilon 1e-6 --glu-activation geglu_tanh --disable-bias-linear --apply-layernorm-1p
    --scale-embedding --sandwich-norm --group-query-attention --num-query-groups 2
    --max-position-embeddings 4096 --window-size 3,0 --window-attn-skip-freq 2
"""
GEMMA_2 = f"{GEMMA} --attn-logit-softcapping 2 --final-logit-softcapping 3"
GEMMA_3 = f"{GEMMA} --qk-layernorm --rotary-base 1e6 --rotary-local-base 1000"
HEADS, GROUPS, HEAD_DIM, LAYERS, VOCAB = 6, 2, 8, 3, 12


def network(group, flags):
    spec = tiny_plan(*SIZES.split(), *flags.split()).model
    return spec, spread_network(spec, group)


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
LAYERS_OF_GEMMA = {
    "pad_token_id": None,  # its row of the table would get no gradient
    "query_pre_attn_scalar": HEAD_DIM,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def hugging_face_llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **changes)).eval()


def hugging_face_gemma_2():
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    return Gemma2ForCausalLM(Gemma2Config(**SHAPE, **LAYERS_OF_GEMMA, **caps)).eval()


def hugging_face_gemma_3():
    bases = {"rope_theta": 1e6, "rope_local_base_freq": 1000.0}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **LAYERS_OF_GEMMA, **bases)).eval()


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


CASES = {
    "llama 2": (LLAMA_2, hugging_face_llama),
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
    ),
    "gemma 2": (GEMMA_2, hugging_face_gemma_2),
    "gemma 3": (GEMMA_3, hugging_face_gemma_3),
    "bloom": (f"{BLOOM} --ffn-hidden-size 96", hugging_face_bloom),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_hugging_face(group, case):
    flags, build = CASES[case]
    spec, model = network(group, flags)
    reference = build()
    renamed = in_transformers(spec, model.state_dict())
    missing, unexpected = reference.load_state_dict(renamed, strict=False)
    assert (missing, unexpected) == (
        ["lm_head.weight"] if spec.vocabulary.tied_embeddings else [],
        [],
    )
    tokens = torch.randint(VOCAB, (3, 10))
    positions = torch.arange(10).expand_as(tokens)
    logits, expected = model(batch_of(tokens, positions)), reference(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    for prediction in (logits, expected):
        F.cross_entropy(prediction.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    own = in_transformers(spec, {name: p.grad for name, p in model.named_parameters()})
    assert theirs.keys() == own.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(own[name], gradient, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama 2", "llama 3.1"])
def test_frequencies_are_those_of_hugging_face(group, case):
    flags, build = CASES[case]
    spec, _ = network(group, f"{flags} --kv-channels 128")
    config = build().config
    config.head_dim = 128
    rotary = type(build().model.rotary_emb)(config)
    torch.testing.assert_close(
        rotary_frequencies(spec.positions, torch.device("cpu")), rotary.inv_freq, atol=0, rtol=1e-5
    )
