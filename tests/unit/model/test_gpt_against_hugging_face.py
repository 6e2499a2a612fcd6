"""The whole network against Hugging Face's GPT-2 with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_spec
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.model.gpt import gpt_layers
from megatron.model.init import initialise
from megatron.model.layers import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.parallel.random import OrdinaryStream

SIZES = {
    "num_layers": 3,
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "head_dim": 6,
    "seq_length": 10,
    "max_position_embeddings": 13,
    "vocab_size": 30,
    "padded_vocab_size": 32,
    "init_std": 0.1,
}


def ours(group):
    spec = tiny_spec(**SIZES)
    model = SequentialModel(gpt_layers(spec, group=group, rng=OrdinaryStream(), mixed=False))
    initialise(model, seed=1, std=spec.init_std, num_layers=spec.num_layers)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms that are not all zeros and ones
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def hugging_face(weights):
    """Return Hugging Face's model with our weights: it has q, k and v of all heads one by one."""
    config = GPT2Config(
        vocab_size=SIZES["padded_vocab_size"],
        n_positions=SIZES["max_position_embeddings"],
        n_embd=SIZES["hidden_size"],
        n_layer=SIZES["num_layers"],
        n_head=SIZES["num_attention_heads"],
        n_inner=SIZES["ffn_hidden_size"],
        activation_function="gelu_new",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-5,
    )
    model = GPT2LMHeadModel(config).eval()
    model.load_state_dict(to_hugging_face(weights))
    return model


def to_hugging_face(weights):
    """Rename and reorder: their linear layers hold [in, out], and q, k, v above the heads."""
    heads, head_dim = SIZES["num_attention_heads"], SIZES["head_dim"]
    embed, last = "tied_modules.embed", SIZES["num_layers"] + 4
    table = weights[f"{embed}.word_embeddings.weight"]
    renamed = {
        "transformer.wte.weight": table,
        "lm_head.weight": table,
        "transformer.wpe.weight": weights[f"{embed}.position_embeddings.weight"],
        "transformer.ln_f.weight": weights[f"{last}.weight"],
        "transformer.ln_f.bias": weights[f"{last}.bias"],
    }
    for layer in range(SIZES["num_layers"]):
        own, theirs = f"{3 + layer}", f"transformer.h.{layer}"
        for name, other in {
            "input_layernorm": "ln_1",
            "self_attention.query_key_value": "attn.c_attn",
            "self_attention.dense": "attn.c_proj",
            "post_attention_layernorm": "ln_2",
            "mlp.dense_h_to_4h": "mlp.c_fc",
            "mlp.dense_4h_to_h": "mlp.c_proj",
        }.items():
            weight, bias = weights[f"{own}.{name}.weight"], weights[f"{own}.{name}.bias"]
            if other == "attn.c_attn":
                by_head = weight.view(heads, 3, head_dim, -1)
                weight = torch.cat([by_head[:, part].flatten(0, 1) for part in range(3)])
                bias = torch.cat([bias.view(heads, 3, head_dim)[:, p].flatten() for p in range(3)])
            renamed[f"{theirs}.{other}.weight"] = weight.T if weight.dim() == 2 else weight
            renamed[f"{theirs}.{other}.bias"] = bias
    return renamed


@pytest.fixture
def inputs():
    torch.manual_seed(2)
    tokens = torch.randint(SIZES["vocab_size"], (3, SIZES["seq_length"]))
    return tokens, torch.arange(SIZES["seq_length"]).expand_as(tokens)


def test_logits_are_equal(group, inputs):
    model = ours(group)
    with torch.no_grad():
        expected = hugging_face(model.state_dict())(inputs[0]).logits
        torch.testing.assert_close(model(inputs), expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_equal(group, inputs):
    model = ours(group)
    reference = hugging_face(model.state_dict())
    tokens, positions = inputs
    labels, mask = tokens.roll(-1, 1), torch.ones(tokens.shape)
    next_token_loss(group)(model((tokens, positions)), (labels, mask)).backward()
    logits = reference(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    gradients = to_hugging_face({name: p.grad for name, p in model.named_parameters()})
    assert len(gradients) == 5 + 12 * SIZES["num_layers"]
    parameters = dict(reference.named_parameters())
    compared = {name for name in gradients if name in parameters}
    assert compared == set(gradients) - {"lm_head.weight"}  # tied: counted with the table
    for name in compared:
        torch.testing.assert_close(gradients[name], parameters[name].grad, atol=1e-5, rtol=1e-5)
