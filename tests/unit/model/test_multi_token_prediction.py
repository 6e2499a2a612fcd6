"""Multi-token prediction: its layer against transformers', its loss against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from checkpoints import spread_network
from networks import gpt_steps
from tiny import LLAMA, batch_of, tiny_spec
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from megatron.config.data.masks import MaskPlan
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.model.prediction_loss import loss_with_predictions
from megatron.objectives.gpt import gpt_batch

SIZES = LLAMA | {
    "hidden_size": 24,
    "ffn_hidden_size": 40,
    "num_attention_heads": 4,
    "head_dim": 6,
    "norm_epsilon": 1e-6,
    "seq_length": 10,
    "max_position_embeddings": 10,
    "vocab_size": 30,
    "padded_vocab_size": 32,
    "init_std": 0.1,
}
TWO = {"prediction_depths": 2, "prediction_loss_scale": 0.3}
EOD = 3


def spec_of(**changes):
    return tiny_spec(**SIZES | TWO | changes)


def tokens_of(length=10):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(30, (3, length), generator=generator)


def theirs_of(ours, prefix):
    """Return the weights of a Llama layer that has the fused weights of ours."""
    given = {n.removeprefix(prefix): w for n, w in ours.items() if n.startswith(prefix)}
    qkv = given["self_attention.query_key_value.weight"].view(2, 4, 6, 24)
    gate_up = given["mlp.dense_h_to_4h.weight"].view(40, 2, 24)
    return {
        "input_layernorm.weight": given["input_layernorm.weight"],
        "post_attention_layernorm.weight": given["post_attention_layernorm.weight"],
        "self_attn.q_proj.weight": qkv[:, :2].reshape(24, 24),
        "self_attn.k_proj.weight": qkv[:, 2].reshape(12, 24),
        "self_attn.v_proj.weight": qkv[:, 3].reshape(12, 24),
        "self_attn.o_proj.weight": given["self_attention.dense.weight"],
        "mlp.gate_proj.weight": gate_up[:, 0],
        "mlp.up_proj.weight": gate_up[:, 1],
        "mlp.down_proj.weight": given["mlp.dense_4h_to_h.weight"],
    }


@torch.no_grad()
def test_each_depth_is_that_of_transformers(group):
    spec, tokens = spec_of(), tokens_of()
    model = spread_network(spec, group)
    ours, positions = dict(model.named_parameters()), torch.arange(10).expand_as(tokens)
    config = LlamaConfig(
        **{"vocab_size": 32, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-6},
        attn_implementation="eager",
    )
    main = LlamaForCausalLM(config).eval()
    weights = {
        f"model.layers.{n}.{k}": w for n in (0, 1) for k, w in theirs_of(ours, f"{3 + n}.").items()
    }
    table = ours["tied_modules.embed.word_embeddings.weight"]
    main.load_state_dict(
        weights
        | {
            "model.embed_tokens.weight": table,
            "model.norm.weight": ours["6.final_layernorm.weight"],
            "lm_head.weight": ours["7.word_embeddings.weight"],
        }
    )
    hidden = main.model(tokens).last_hidden_state
    rotary = main.model.rotary_emb(hidden, positions)
    mask = torch.full((10, 10), float("-inf")).triu(1)[None, None]
    expected = [main.lm_head(hidden)]
    for depth in (0, 1):
        layer, prefix = (
            MtpLayer(config, LlamaDecoderLayer, LlamaRMSNorm, depth).eval(),
            f"6.layers.{depth}.",
        )
        block = theirs_of(ours, f"{prefix}transformer_layer.")
        own = {n: ours[f"{prefix}{n}.weight"] for n in ("enorm", "hnorm", "eh_proj")}
        layer.load_state_dict(
            {f"mtp_block.{name}": weight for name, weight in block.items()}
            | {f"{name}.weight": weight for name, weight in own.items()}
            | {"post_norm.weight": ours[f"{prefix}final_layernorm.weight"]}
        )
        embedded = F.embedding(tokens.roll(-1 - depth, 1), table)
        hidden = layer(embedded, hidden, rotary, mask, positions, None)
        expected.append(main.lm_head(hidden))
    logits = model(batch_of(tokens, positions))
    assert_close(logits, torch.cat(expected), atol=3e-6, rtol=1e-5)


def plain_loss(logits, batch, scale, documents=None):
    """Return both losses, counted token by token."""
    depths = len(logits) // 3 - 1
    labels, mask = batch["labels"], batch["loss_mask"]
    means = []
    for depth in range(depths + 1):
        losses = []
        for sample in range(3):
            for i in range(10 - depth):
                same = documents is None or documents[sample][i] == documents[sample][i + depth]
                if same and mask[sample, i + depth]:
                    row = logits[depth * 3 + sample, i, :30]
                    losses.append(F.cross_entropy(row, labels[sample, i + depth]))
        means.append(torch.stack(losses).mean())
    ahead = torch.stack(means[1:]).mean()
    return means[0] + scale * ahead, means[0], ahead


ISOLATED = MaskPlan(reset_positions=True, isolate_documents=True, mask_loss=True)
MASKED = MaskPlan(reset_positions=False, isolate_documents=False, mask_loss=True)


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("masks", [ISOLATED, MASKED], ids=["documents", "masked"])
def test_the_loss_and_its_gradient_are_the_plain_ones(group, masks, chunk):
    tokens = tokens_of(11)
    tokens[0, [2, 5]] = tokens[1, [7]] = EOD
    batch = gpt_batch(tokens, masks, EOD)
    ends = (tokens[:, :-1] == EOD).long()
    documents = (ends.cumsum(1) - ends).tolist() if masks.isolate_documents else None
    model = spread_network(spec_of(), group)
    total, main, ahead = plain_loss(model(batch), batch, 0.3, documents)
    expected = torch.autograd.grad(total, [*model.parameters()])

    spec = spec_of()
    fields = {"batch_fields": tuple(batch), "loss_chunk_tokens": chunk}
    chunked = SequentialModel(gpt_steps(spec, group=group, **fields))
    chunked.load_state_dict(model.state_dict())
    loss = loss_with_predictions(next_token_loss(group, vocab_size=30), spec.prediction)
    found = loss(chunked(batch), batch)
    assert_close(found.total, main)
    assert_close(found.terms["mtp loss"], ahead)
    for gradient, want in zip(
        torch.autograd.grad(found.total, [*chunked.parameters()]), expected, strict=True
    ):
        assert_close(gradient, want, atol=1e-6, rtol=1e-4)


def test_with_one_weight_for_each_token_a_depth_counts_as_much_as_the_next_token(group):
    """Fewer tokens have a later one; the mean loss of a depth is not smaller for that."""
    batch, spec = gpt_batch(tokens_of(11)), spec_of()
    model = spread_network(spec, group)
    mean = loss_with_predictions(next_token_loss(group), spec.prediction)(model(batch), batch)
    counted = next_token_loss(group, mean_count=lambda: batch["loss_mask"].sum())
    found = loss_with_predictions(counted, spec.prediction)(model(batch), batch)
    assert_close(found.terms["mtp loss"], mean.terms["mtp loss"])


def test_a_sample_without_a_later_token_has_no_loss_of_a_depth(group):
    batch, spec = gpt_batch(tokens_of(11)), spec_of()
    batch["loss_mask"][:, 1:] = 0
    model = spread_network(spec, group)
    found = loss_with_predictions(next_token_loss(group), spec.prediction)(model(batch), batch)
    assert found.terms["mtp loss"].item() == 0
    found.total.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_one_repeated_layer_is_all_depths(group):
    repeated = spread_network(spec_of(prediction_repeated=True), group)
    twice = spread_network(spec_of(), group)
    weights = repeated.state_dict()
    again = {n.replace("6.layers.0.", "6.layers.1."): w for n, w in weights.items()}
    twice.load_state_dict(weights | again)
    batch = gpt_batch(tokens_of(11))
    assert_close(repeated(batch), twice(batch))


def test_generation_builds_no_layer_that_predicts(group):
    spec, batch = spec_of(), gpt_batch(tokens_of(11))
    model = spread_network(spec, group)
    without = SequentialModel(gpt_steps(spec, group=group, predicts=False)).eval()
    weights = model.state_dict()
    without.load_state_dict({name: weights[name] for name in without.state_dict()})
    assert len(weights) - len(without.state_dict()) == 2 * 10
    assert_close(without(batch), model(batch)[:3])
