"""Masks filled, sentences scored and embedded, against the network itself."""

import numpy as np
import pytest
import torch
from host_syncs import CudnnAttention
from masked_lms import masked_lm
from problems import problem

from megatron.common.errors import DataError
from megatron.extensions.bert.inference import mask_notice


@pytest.fixture
def model(tmp_path, group):
    return masked_lm(tmp_path)


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
    output = logits_of(model, [2, 5, 3, 7, 6, 3], [0, 0, 0, 1, 1, 1])
    assert model.in_order("a\tc b") == pytest.approx(float(output.order_logits.softmax(-1)[0, 0]))
    assert model.in_order("a c d") is None


def test_embeddings_are_means_without_the_ends(model):
    both = model.embed(["a b c", "d"])
    assert (both.shape, both.dtype) == ((2, 8), np.float32)
    assert both[1] == pytest.approx(model.embed(["d"])[0])
    assert np.abs(both[0] - both[1]).max() > 0.01


def test_texts_without_tokens_are_not_embedded(model):
    with problem("text 2 of 3, ' ' … no tokens"):
        model.embed(["a", " ", "d"])


def test_a_text_longer_than_the_network_is_refused(model):
    with problem("10 tokens", DataError):
        model.score("a b c d a b c d")


def test_a_mask_in_other_letters_gets_a_notice():
    assert "[mask] in 'a [mask]' is plain text" in mask_notice("a [mask]")
    assert "[Mask]" in mask_notice("[MASK] [Mask]")
    assert mask_notice("a [MASK] mask") is None


def test_a_text_is_assessed_by_its_masks(model):
    filled, scored = model.assess("a [MASK]", 2), model.assess("a\tc", 2)
    assert filled.masks == model.fill("a [MASK]", 2) and filled.log_likelihood is None
    assert (scored.log_likelihood, scored.num_tokens) == model.score("a\tc")
    assert (scored.masks, scored.in_order) == ([], model.in_order("a\tc"))
    assert len(model.fill("[MASK]", 999)[0]) == model.tokenizer.vocab_size


def test_attention_is_not_by_cudnn(model):
    with CudnnAttention() as attention:
        model.fill("a [MASK]", 1), model.in_order("a\tb"), model.embed(["a"])
    assert len(attention.allowed) == 3 * model.runner.spec.num_layers and not any(attention.allowed)
