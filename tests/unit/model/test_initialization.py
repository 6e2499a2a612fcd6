"""Initial weights: the same for every layout, with the configured spread."""

import math

import pytest
import torch
from networks import gpt_steps
from problems import problem
from tiny import Shards, tiny_spec

from megatron.model.initialization import initialise, nan_in_empty_tensors
from megatron.model.layers.layer_list import SequentialModel
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import mark_initial, mark_residual, shard_of

SIZES = {
    "num_layers": 2,
    "hidden_size": 24,
    "ffn_hidden_size": 200,
    "num_attention_heads": 4,
    "head_dim": 10,
    "vocab_size": 136,
    "padded_vocab_size": 136,
    "init_std": 0.05,
}


OTHERS = {
    "num_query_groups": 4,
    "activation": "swiglu",
    "tied_embeddings": False,
    "position_embedding": "rotary",
    "rotary_dim": 10,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "embed_layernorm": True,
}


def model_of(index=0, count=1, seed=3, **changes):
    spec = tiny_spec(**(SIZES | changes))
    steps = gpt_steps(spec, group=Shards(index, count), rng=OrdinaryStream(), mixed=False)
    model = SequentialModel(steps)
    initialise(
        model,
        seed=seed,
        std=spec.init_std,
        num_layers=spec.num_layers,
        xavier=spec.init == "xavier_uniform",
        vocab_size=None if spec.vocabulary.padded_vocab_in_softmax else spec.vocabulary.vocab_size,
    )
    return model


def matrices(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("changes", [{}, OTHERS, OTHERS | {"init": "xavier_uniform"}])
def test_shards_laid_side_by_side_are_the_whole(count, changes):
    whole = model_of(**changes)
    shards = [dict(model_of(i, count, **changes).named_parameters()) for i in range(count)]
    for name, parameter in whole.named_parameters():
        shard = shard_of(shards[0][name])
        pieces = [own[name] for own in shards]
        if shard is None:
            assert all(torch.equal(piece, parameter) for piece in pieces), name
        else:
            assert torch.equal(torch.cat(pieces, shard.dim), parameter), name


def test_which_matrices_are_divided_and_along_what():
    dims = {
        name: shard.dim
        for name, p in model_of().named_parameters()
        if name.startswith(("3.", "tied")) and (shard := shard_of(p))
    }
    assert dims == {
        "tied_modules.embed.word_embeddings.weight": 0,
        "3.self_attention.query_key_value.weight": 0,
        "3.self_attention.query_key_value.bias": 0,
        "3.self_attention.dense.weight": 1,
        "3.mlp.dense_h_to_4h.weight": 0,
        "3.mlp.dense_h_to_4h.bias": 0,
        "3.mlp.dense_4h_to_h.weight": 1,
    }


@pytest.mark.parametrize("init", ["normal", "xavier_uniform"])
def test_padding_is_zero_and_leaves_the_rows_of_the_tokens_alone(init):
    name = "tied_modules.embed.word_embeddings.weight"
    small = model_of(init=init).state_dict()[name]
    large = model_of(init=init, padded_vocab_size=200).state_dict()[name]
    assert torch.equal(large[:136], small)
    assert not large[136:].any()
    parts = [model_of(i, 4, padded_vocab_size=200, init=init) for i in range(4)]
    assert torch.equal(torch.cat([part.state_dict()[name] for part in parts]), large)


def test_padding_that_takes_part_in_the_softmax_is_drawn_as_all_rows():
    name = "tied_modules.embed.word_embeddings.weight"
    table = model_of(vocab_size=130, padded_vocab_in_softmax=True).state_dict()[name]
    assert table.abs().sum(1).min() > 0


def test_no_two_matrices_begin_alike():
    starts = {name: tuple(p[0, :4].tolist()) for name, p in matrices(model_of()).items()}
    assert len(set(starts.values())) == len(starts) == 10


def test_no_two_rows_are_alike():
    table = matrices(model_of())["tied_modules.embed.word_embeddings.weight"]
    assert len({tuple(row.tolist()) for row in table}) == 136


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    first, again, other = (matrices(model_of(seed=seed)) for seed in (3, 3, 4))
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_nothing_is_drawn_from_the_streams_of_training():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    table = torch.nn.Embedding.from_pretrained(torch.empty(70, 3))
    initialise(table, seed=1, std=1.0, num_layers=1)
    assert torch.equal(torch.randn(3), expected)


def test_biases_are_zero_and_norms_are_one():
    for name, parameter in model_of().named_parameters():
        if parameter.dim() == 1:
            is_norm = "layernorm.weight" in name or name == "6.weight"
            assert (parameter == float(is_norm)).all(), name


def test_the_spread_is_the_one_asked_for():
    for name, matrix in matrices(model_of(hidden_size=120, head_dim=30)).items():
        before_residual = name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))
        std = 0.05 / math.sqrt(2 * 2) if before_residual else 0.05
        # Six standard errors of mean and of standard deviation of so many numbers.
        error = 6 * std / math.sqrt(matrix.numel())
        assert abs(float(matrix.mean())) < error, name
        assert abs(float(matrix.std()) - std) < error / math.sqrt(2), name


def test_xavier_spreads_evenly_up_to_its_bound():
    for name, matrix in matrices(model_of(init="xavier_uniform", hidden_size=120)).items():
        bound = math.sqrt(6 / sum(matrix.shape))
        assert 0.99 * bound < matrix.abs().max() <= bound, name
        # Six standard errors of the standard deviation of so many even numbers.
        error = 6 * bound * math.sqrt(1 / 15) / math.sqrt(matrix.numel())
        assert abs(float(matrix.std()) - bound / math.sqrt(3)) < error, name
        low, high = (float((matrix < edge * bound).float().mean()) for edge in (-0.5, 0.5))
        assert (low, high) == (pytest.approx(0.25, abs=0.05), pytest.approx(0.75, abs=0.05))


def test_weights_around_one_begin_at_zero():
    for name, parameter in model_of(layernorm_1p=True).named_parameters():
        assert parameter.dim() == 2 or (parameter == 0).all(), name


def test_16_bit_weights_are_the_rounded_32_bit_ones():
    model = model_of()
    half = model_of().bfloat16()
    initialise(half, seed=3, std=0.05, num_layers=2)
    for name, p in model.named_parameters():
        assert torch.equal(half.state_dict()[name], p.detach().bfloat16()), name


class Marked(torch.nn.Module):
    """Parameters with names that say nothing."""

    def __init__(self, gate):
        super().__init__()
        self.out = mark_residual(torch.nn.Parameter(torch.empty(80, 80)))
        self.inner = torch.nn.Parameter(torch.empty(80, 80))
        self.table = mark_initial(torch.nn.Parameter(torch.ones(4, 2)), "constructed")
        self.gate = torch.nn.Parameter(gate(3))


def test_marks_decide_not_names():
    with nan_in_empty_tensors():
        model = Marked(torch.ones)
    initialise(model, seed=1, std=1.0, num_layers=8)
    assert float(model.out.std()) == pytest.approx(0.25, rel=0.1)
    assert float(model.inner.std()) == pytest.approx(1, rel=0.1)
    assert (model.table == 1).all() and (model.gate == 1).all()


def test_a_parameter_without_initial_values_is_named():
    assert not torch.are_deterministic_algorithms_enabled()
    with nan_in_empty_tensors():
        model = torch.nn.ModuleList([Marked(torch.ones), Marked(torch.empty)])
    assert not torch.are_deterministic_algorithms_enabled()
    with problem("no initial values: 1.gate; … torch.zeros"):
        initialise(model, seed=1, std=1.0, num_layers=8)
