"""Masks filled, sentences scored and embedded, against the network itself."""

import numpy as np
import pytest
import torch
from tiny import tiny_spec

from megatron.checkpointing.hugging_face.network import parameters_of
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, unsharded
from megatron.common.errors import DataError
from megatron.inference.engine.encoder_runner import EncoderRunner
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.loading.masked_lm import MaskedLM
from megatron.model.bert import bert_layers
from megatron.tokenizer.types.wordpiece import WordPieceTokenizer

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]


@pytest.fixture
def model(tmp_path, group):
    (tmp_path / "vocab.txt").write_text("\n".join(TOKENS))
    spec = tiny_spec(
        **{"architecture": "bert", "num_token_types": 2, "binary_head": True},
        max_position_embeddings=9,
    )
    torch.manual_seed(3)
    weights = {
        name: ParameterState(weight=unsharded(0.5 * torch.randn(p.shape)))
        for name, p in parameters_of(spec).items()
    }
    network = EncoderRunner(
        spec,
        weights,
        layers=bert_layers,
        groups=lone_groups(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return MaskedLM(network, WordPieceTokenizer(tmp_path / "vocab.txt", lower_case=True))


def logits_of(model, tokens, types):
    row, length = torch.tensor([tokens]), len(tokens)
    batch = {
        "tokens": row,
        "token_types": torch.tensor([types]),
        "positions": torch.arange(length)[None],
        "attention_span": torch.tensor([[[0, length]]]),
    }
    with torch.no_grad():
        return model.runner.model(batch)


def test_masks_are_filled_with_the_likeliest_tokens(model):
    first, second = model.fill("a [MASK] b [MASK]", top=2)
    logits = logits_of(model, [2, 5, 4, 6, 4, 3], [0] * 6).logits[0, :, :11]
    for place, found in ((2, first), (4, second)):
        chances, ids = logits[place].softmax(-1).topk(2)
        assert [each.token for each in found] == [model.tokenizer.decode([i]) for i in ids]
        assert [each.probability for each in found] == pytest.approx(chances.tolist())


def test_a_sentence_is_scored_token_by_token(model):
    total, count = model.score("a\tc")
    chances = [
        logits_of(model, tokens, [0, 0, 0, 1, 1]).logits[0, place, :11].log_softmax(-1)[token]
        for tokens, place, token in (([2, 4, 3, 7, 3], 1, 5), ([2, 5, 3, 4, 3], 3, 7))
    ]
    assert (total, count) == (pytest.approx(float(sum(chances))), 2)


def test_the_order_of_two_segments_has_a_probability(model):
    output = logits_of(model, [2, 5, 3, 7, 8, 3], [0, 0, 0, 1, 1, 1])
    assert model.in_order("a\tc d") == pytest.approx(float(output.order_logits.softmax(-1)[0, 0]))
    assert model.in_order("a c d") is None


def test_embeddings_are_means_without_the_ends(model):
    both = model.embed(["a b c", "d"])
    assert (both.shape, both.dtype) == ((2, 8), np.float32)
    assert both[1] == pytest.approx(model.embed(["d"])[0])
    assert np.abs(both[0] - both[1]).max() > 0.01


def test_a_text_longer_than_the_network_is_refused(model):
    with pytest.raises(DataError, match="has 10 tokens"):
        model.score("a b c d a b c d")
