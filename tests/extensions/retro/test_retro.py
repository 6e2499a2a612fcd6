"""Retro: golden numbers, a second implementation in plain PyTorch, influence of each neighbor, padding."""

import math
from dataclasses import replace

import pytest
import torch
from plain_retro import PlainRetro
from problems import problem
from retro_golden import CORE_LOGITS, CORE_LOSS, golden_batch, golden_tensor
from tiny import tiny_plan, tiny_spec, with_changes
from torch.testing import assert_close

from megatron.extensions.retro.layers import retro_layers
from megatron.extensions.retro.objective import RETRO_FIELDS, Retro
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.gpt import gpt_layers
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import Recomputation, SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.objectives.gpt import CAUSAL_FIELDS
from megatron.tensor_parallel.rng import OrdinaryStream

SPEC = tiny_spec(
    architecture="retro",
    num_layers=9,
    hidden_size=16,
    ffn_hidden_size=64,
    num_attention_heads=4,
    head_dim=4,
    seq_length=16,
    max_position_embeddings=16,
    vocab_size=32,
    padded_vocab_size=32,
    activation="gelu_erf",
    retro_layers=(6, 9),
    retro_encoder_layers=2,
    retro_chunk_length=4,
    retro_num_neighbors=2,
    retro_retrieved_length=8,
)
CORE = with_changes(SPEC, retro_normed_residual=True, final_norm=False)


def model_of(
    spec, group, *, kernels=REFERENCE, layers=retro_layers, recomputation=None, batch_fields=None
):
    steps = layers(
        spec,
        LayerParts(
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(spec, kernels),
            batch_fields=batch_fields
            or (RETRO_FIELDS if layers is retro_layers else CAUSAL_FIELDS),
            kernels=kernels,
        ),
    )
    return SequentialModel(steps, recomputation=recomputation)


def golden_pair(tag, names, width, columns):
    """Return weight and bias of linear layers whose heads lie side by side: {names}, head_dim."""
    both = []
    for kind, shape in (("weight", (width, columns)), ("bias", (width,))):
        parts = [golden_tensor(f"{tag}.{name}.{kind}", *shape) for name in names]
        both.append(torch.stack([part.unflatten(0, (4, 4)) for part in parts], 1).flatten(0, 2))
    return both


def golden_layer(tag, prefix, *, crosses):
    """Yield the golden weights of one layer by our names."""
    norms = {"input_layernorm": "innorm", "post_attention_layernorm": "mlpnorm"}
    linear = {
        "self_attention.dense": ("self.out", 16, 16),
        "mlp.dense_h_to_4h": ("mlp.fc1", 64, 16),
        "mlp.dense_4h_to_h": ("mlp.fc2", 16, 64),
    }
    fused = {"self_attention.query_key_value": ("self", "qkv")}
    if crosses:
        norms["pre_inter_attention_layernorm"] = "crossnorm"
        linear["inter_attention.dense"] = ("cross.out", 16, 16)
        fused |= {
            "inter_attention.query": ("cross", "q"),
            "inter_attention.key_value": ("cross", "kv"),
        }
    for ours, theirs in norms.items():
        for kind in ("weight", "bias"):
            yield f"{prefix}.{ours}.{kind}", golden_tensor(f"{tag}.{theirs}.{kind}", 16)
    for ours, (theirs, rows, columns) in linear.items():
        yield f"{prefix}.{ours}.weight", golden_tensor(f"{tag}.{theirs}.weight", rows, columns)
        yield f"{prefix}.{ours}.bias", golden_tensor(f"{tag}.{theirs}.bias", rows)
    for ours, (part, names) in fused.items():
        weight, bias = golden_pair(f"{tag}.{part}", names, 16, 16)
        yield f"{prefix}.{ours}.weight", weight
        yield f"{prefix}.{ours}.bias", bias


def golden_weights(*, retrieves=True, final_norm=True):
    weights = {
        "tied_modules.embed.word_embeddings.weight": golden_tensor("embed.word", 32, 16),
        "tied_modules.embed.position_embeddings.weight": golden_tensor("embed.position", 16, 16),
    }
    for number in range(1, 10):
        crosses = retrieves and number in (6, 9)
        weights |= golden_layer(f"dec{number}", str(number + 2), crosses=crosses)
    if retrieves:
        for number in (1, 2):
            prefix = f"8.encoder.layers.{number - 1}"
            weights |= golden_layer(f"enc{number}", prefix, crosses=number == 1)
    if final_norm:
        weights |= {
            f"13.{kind}": golden_tensor(f"final.norm.{kind}", 16) for kind in ("weight", "bias")
        }
    return weights


def golden_model(spec, group, **how):
    retrieves = how.get("layers", retro_layers) is retro_layers
    model = model_of(spec, group, **how).double()
    model.load_state_dict(golden_weights(retrieves=retrieves, final_norm=spec.own.final_norm))
    return model


def loss_of(logits, batch):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


GOLDEN = {
    "right": (
        SPEC,
        [
            [1.309435, -1.903894, -2.082434, 1.058405],
            [1.560952, -1.756682, -2.274182, 0.833342],
            [1.507362, -1.933591, -2.292419, 1.002847],
        ],
        4.78553023,
    ),
    "Megatron core": (
        CORE,
        CORE_LOGITS,
        CORE_LOSS,
    ),
    "normed residual": (
        with_changes(SPEC, retro_normed_residual=True),
        [
            [1.309435, -1.903894, -2.082434, 1.058405],
            [1.535333, -1.746017, -2.244233, 0.834836],
            [1.494307, -1.93226, -2.278823, 1.007035],
        ],
        4.77327013,
    ),
}


@pytest.mark.parametrize("form", GOLDEN)
def test_logits_and_loss_are_the_golden_ones(form, group):
    spec, logits, loss = GOLDEN[form]
    batch = golden_batch()
    got = golden_model(spec, group)(batch)
    found = torch.stack([got[0, 0, :4], got[0, 3, :4], got[1, 15, :4]])
    assert_close(found, torch.tensor(logits, dtype=torch.float64), rtol=0, atol=1e-6)
    assert loss_of(got, batch).item() == pytest.approx(loss, abs=1e-8)


def test_a_token_weighs_the_same_in_each_micro_batch(group):
    model, batch = golden_model(SPEC, group), golden_batch()
    mask = torch.ones(batch["labels"].shape)
    mask[1, 3:] = 0
    batch["loss_mask"] = mask
    loss = Retro().loss(
        tiny_plan("--num-layers", "9", "--retro-chunk-length", "3", objective="retro").objective
    )(group, mean_count=lambda: mask.sum() / 2)
    halves = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in range(2)]
    found = sum(loss(model(half), half) for half in halves) / 2
    of_token = torch.nn.functional.cross_entropy(
        model(batch).transpose(1, 2), batch["labels"], reduction="none"
    )
    assert found.item() == pytest.approx(((of_token * mask).sum() / mask.sum()).item())


def test_gradients_are_the_golden_ones(group):
    model, batch = golden_model(SPEC, group), golden_batch()
    loss_of(model(batch), batch).backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    assert math.hypot(*norms.values()) == pytest.approx(2.092283, abs=1e-6)
    assert sum(p.numel() for p in model.parameters()) == 40240 == SPEC.num_parameters
    query = "8.inter_attention.query.weight"
    keys = "8.encoder.layers.0.inter_attention.key_value.weight"
    assert norms[query] == pytest.approx(0.04811, abs=1e-6)
    assert norms["8.encoder.layers.1.mlp.dense_4h_to_h.weight"] == pytest.approx(0.186137, abs=1e-6)
    assert norms["tied_modules.embed.word_embeddings.weight"] == pytest.approx(1.025955, abs=1e-6)
    gradients = {
        name: p.grad.unflatten(0, (4, 2, 4))
        for name, p in model.named_parameters()
        if name in (keys, "11.inter_attention.key_value.weight")
    }
    assert gradients[keys][:, 0].norm().item() == pytest.approx(4.5e-05, abs=1e-6)
    values = gradients["11.inter_attention.key_value.weight"][:, 1]
    assert values.norm().item() == pytest.approx(0.205475, abs=1e-6)


def test_other_neighbors_of_a_chunk_change_the_loss_as_golden(group):
    model, batch = golden_model(SPEC, group), golden_batch()
    batch["neighbor_tokens"][0, 1] = (batch["neighbor_tokens"][0, 1] + 11) % 32
    assert loss_of(model(batch), batch).item() == pytest.approx(4.78666480, abs=1e-8)


def test_a_gate_of_zero_leaves_the_gpt(group):
    batch = golden_batch()
    gated = golden_model(with_changes(SPEC, retro_attention_gate=0.0), group)(batch)
    plain = golden_model(with_changes(SPEC, retro_layers=()), group, layers=gpt_layers)(batch)
    assert_close(gated, plain, rtol=0, atol=0)
    assert loss_of(gated, batch).item() == pytest.approx(4.73143305, abs=1e-8)
    expected = torch.tensor([1.455079, -1.892941, -2.223632, 0.990125], dtype=torch.float64)
    assert_close(gated[1, 15, :4], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("s", "first"), [(16, [3, 7, 11, 15]), (14, [1, 5, 9, 13])])
def test_neighbors_are_first_felt_by_the_last_token_of_their_chunk(s, first, group):
    """Also where the first chunk is short; and tokens are never felt by those before them."""
    model, batch = golden_model(SPEC, group), golden_batch()
    batch |= {name: batch[name][:, :s] for name in ("tokens", "positions")}
    with torch.no_grad():
        logits = model(batch)
        for chunk, position in enumerate(first):
            other = batch["neighbor_tokens"].clone()
            other[:, chunk] = (other[:, chunk] + 11) % 32
            changed = (model(batch | {"neighbor_tokens": other}) - logits).abs().amax(-1) > 1e-12
            assert changed.int().argmax(1).tolist() == [position] * 2
            assert not changed[:, :position].any()
        for t in range(s):
            other = batch["tokens"].clone()
            other[:, t] = (other[:, t] + 1) % 32
            assert_close(model(batch | {"tokens": other})[:, :t], logits[:, :t], rtol=0, atol=1e-12)


def test_the_order_of_neighbors_has_no_effect(group):
    model, batch = golden_model(SPEC, group), golden_batch()
    turned = batch | {"neighbor_tokens": batch["neighbor_tokens"].flip(2)}
    assert_close(model(turned), model(batch), rtol=0, atol=1e-12)


LENGTHS = torch.tensor(
    [[[8, 8], [3, 8], [0, 0], [5, 0]], [[0, 7], [8, 1], [8, 8], [0, 0]]], dtype=torch.int64
)
"""Neighbors that are cut at the end of their document, or missing."""


@pytest.mark.parametrize("s", [16, 13])
@pytest.mark.parametrize("attention", ["sdpa", "fused-softmax", "reference"])
def test_logits_and_gradients_are_those_of_plain_pytorch(attention, s, group):
    spec = with_changes(SPEC, retro_attention_gate=0.7)
    model = golden_model(spec, group, kernels=replace(REFERENCE, attention=attention))
    batch = golden_batch() | {"neighbor_lengths": LENGTHS}
    batch |= {name: batch[name][:, :s] for name in ("tokens", "positions", "labels")}
    weights = dict(model.named_parameters())
    got = torch.autograd.grad(loss_of(model(batch), batch), [*weights.values()])
    plain = PlainRetro(weights, spec)
    torch.set_default_dtype(torch.float64)
    try:
        rows = zip(batch["tokens"], batch["neighbor_tokens"], LENGTHS.tolist(), strict=True)
        logits = torch.stack([plain.logits(*row) for row in rows])
    finally:
        torch.set_default_dtype(torch.float32)
    tolerance = {"rtol": 0, "atol": 1e-6 if attention == "reference" else 1e-11}
    assert_close(model(batch), logits, **tolerance)
    expected = torch.autograd.grad(loss_of(logits, batch), [*weights.values()])
    for name, gradient, wanted in zip(weights, got, expected, strict=True):
        assert_close(gradient, wanted, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def test_padding_of_neighbors_has_no_effect(group):
    model, batch = golden_model(SPEC, group), golden_batch() | {"neighbor_lengths": LENGTHS}
    is_padding = torch.arange(8) >= LENGTHS[..., None]
    other = batch["neighbor_tokens"].masked_fill(is_padding, 9)
    assert_close(model(batch | {"neighbor_tokens": other}), model(batch), rtol=0, atol=1e-12)


@pytest.mark.parametrize("retro", [(6, 9), (6,)])
def test_recomputed_layers_have_the_same_gradients(retro, group):
    """Layers that replace the neighbors, or drop them, are recomputed with others or alone."""
    spec = with_changes(SPEC, retro_layers=retro)
    state = {
        k: v
        for k, v in golden_weights().items()
        if 9 in retro or "11." not in k[:3] or "inter" not in k
    }
    batch = golden_batch() | {"neighbor_lengths": LENGTHS}
    found = []
    for groups in (
        lambda n: [],
        lambda n: [range(n)],
        lambda n: [range(5), range(5, 6), range(6, n)],
    ):
        recomputation = Recomputation(
            groups=groups,
            call=lambda run, *x, shared: torch.utils.checkpoint.checkpoint(
                run, *x, use_reentrant=False
            ),
        )
        model = model_of(spec, group, recomputation=recomputation).double()
        model.load_state_dict(state)
        loss_of(model(batch), batch).backward()
        found.append([p.grad for p in model.parameters()])
    for other in found[1:]:
        assert_close(other, found[0], rtol=0, atol=0)


def test_the_encoder_has_dropouts_of_its_own(group):
    for change in ({"retro_encoder_hidden_dropout": 0.5}, {"retro_encoder_attention_dropout": 0.5}):
        model, batch = golden_model(with_changes(SPEC, **change), group), golden_batch()
        changed = (model(batch) - golden_model(SPEC, group)(batch)).abs().amax(-1)
        assert (changed[:, 3:] > 1e-9).all()
        assert not changed[:, :3].any()


def test_a_prompt_is_the_short_first_chunk_of_its_own_sample(group):
    """Samples of one batch have prompts of their own lengths; nothing else of them retrieves."""
    prompts, lengths = [5, 8], torch.tensor([[[8, 3]], [[0, 6]]])
    golden = golden_batch() | {"neighbor_lengths": lengths}
    batch = golden | {
        "neighbor_tokens": golden["neighbor_tokens"][:, :1],
        "prompt_lengths": torch.tensor(prompts),
    }
    model = golden_model(SPEC, group, batch_fields=[*RETRO_FIELDS, "prompt_lengths"])
    logits = model(batch)
    for row, prompt in enumerate(prompts):
        own = {name: x[row : row + 1] for name, x in golden.items()}
        own["neighbor_tokens"] = own["neighbor_tokens"][:, :2]
        own["neighbor_lengths"] = torch.cat([own["neighbor_lengths"]] * 2, 1)
        spec = with_changes(SPEC, retro_chunk_length=16 - prompt)
        expected = golden_model(spec, group)(own)[0]
        # The last token of all sees the neighbors of the second chunk.
        assert_close(logits[row, :-1], expected[:-1], rtol=0, atol=1e-12)
    batch["neighbor_lengths"] = torch.zeros_like(lengths)
    plain = golden_model(with_changes(SPEC, retro_layers=()), group, layers=gpt_layers)(golden)
    assert_close(model(batch), plain, rtol=0, atol=0)


def test_sequences_that_are_not_the_chunks_are_refused(group):
    batch = golden_batch()
    batch["neighbor_tokens"] = batch["neighbor_tokens"][:, :3]
    batch["neighbor_lengths"] = batch["neighbor_lengths"][:, :3]
    with problem("16 tokens … 3 chunks of 4", ValueError):
        golden_model(SPEC, group)(batch)


def test_rotary_positions_count_from_0_in_each_neighbor(group):
    spec = with_changes(SPEC, position_embedding="rotary", rotary_dim=4)
    model = model_of(spec, group)
    initialise(model, seed=1, std=0.3, num_layers=9)
    batch = golden_batch()
    other = batch["neighbor_tokens"].clone()
    other[..., [0, 7]] = other[..., [7, 0]]
    changed = (model(batch | {"neighbor_tokens": other}) - model(batch)).abs().amax(-1)
    assert (changed[:, 3:] > 1e-7).all()
