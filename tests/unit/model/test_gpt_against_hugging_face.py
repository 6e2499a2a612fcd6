"""The whole network against Hugging Face's GPT-2 with the same weights."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import in_transformers, spread_network
from tiny import batch_of, tiny_spec
from transformers import GPT2Config, GPT2LMHeadModel

from megatron.model.loss import next_token_loss

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


SPEC = tiny_spec(**SIZES)


def hugging_face(weights):
    """Return Hugging Face's model with our weights."""
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
    missing, unexpected = model.load_state_dict(in_transformers(SPEC, weights), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    return model


@pytest.fixture
def inputs():
    torch.manual_seed(2)
    tokens = torch.randint(SIZES["vocab_size"], (3, SIZES["seq_length"]))
    return batch_of(tokens, torch.arange(SIZES["seq_length"]).expand_as(tokens))


def test_logits_are_equal(group, inputs):
    model = spread_network(SPEC, group)
    with torch.no_grad():
        expected = hugging_face(model.state_dict())(inputs["tokens"]).logits
        torch.testing.assert_close(model(inputs), expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_equal(group, inputs):
    model = spread_network(SPEC, group)
    reference = hugging_face(model.state_dict())
    tokens = inputs["tokens"]
    labels, mask = tokens.roll(-1, 1), torch.ones(tokens.shape)
    given = inputs | {"labels": labels, "loss_mask": mask}
    next_token_loss(group)(model(given), given).backward()
    logits = reference(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    gradients = in_transformers(SPEC, {name: p.grad for name, p in model.named_parameters()})
    parameters = dict(reference.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, parameters[name].grad, atol=1e-5, rtol=1e-5)
