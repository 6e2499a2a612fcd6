"""Attention and loss masks of documents that share a sample."""

import torch
from networks import gpt_steps
from problems import problem
from tiny import tiny_spec

from megatron.config.data.masks import MaskPlan
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import gpt_batch
from megatron.tensor_parallel.rng import OrdinaryStream

EOD = 9
ALL = MaskPlan(reset_positions=True, isolate_documents=True, mask_loss=True)
TOKENS = torch.tensor([[3, 1, EOD, 4, 5, EOD, 2], [EOD, EOD, 6, 7, 1, 2, 3]])


def network(group):
    model = SequentialModel(gpt_steps(tiny_spec(), group=group, rng=OrdinaryStream(), mixed=False))
    initialise(model, seed=1, std=0.5, num_layers=2)
    return model


def test_positions_spans_and_loss_mask_are_those_counted_by_hand():
    batch = gpt_batch(TOKENS, ALL, EOD)
    spans = batch["attention_span"]
    assert torch.equal(batch["tokens"], TOKENS[:, :-1])
    assert torch.equal(batch["labels"], TOKENS[:, 1:])
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 2, 3]]
    assert spans[..., 0].tolist() == [[0, 0, 0, 3, 3, 3], [0, 1, 2, 2, 2, 2]]
    assert spans[..., 1].tolist() == [[1, 2, 3, 4, 5, 6]] * 2
    assert batch["loss_mask"].tolist() == [[1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1]]


def test_each_switch_acts_alone():
    only = {"reset_positions": False, "isolate_documents": False, "mask_loss": False}
    plain = gpt_batch(TOKENS)
    for switch in only:
        masks = MaskPlan(**(only | {switch: True}))
        batch = gpt_batch(TOKENS, masks, EOD)
        assert ("attention_span" in batch) == (switch == "isolate_documents")
        assert torch.equal(batch["positions"], plain["positions"]) == (switch != "reset_positions")
        assert bool(batch["loss_mask"].all()) == (switch != "mask_loss")


def test_keeping_apart_needs_the_token_that_ends_a_document():
    with problem("documents … token … ends", ValueError):
        gpt_batch(TOKENS, ALL)


def test_another_document_changes_no_bit_of_a_documents_logits(group):
    model = network(group)
    changed = TOKENS.clone()
    changed[0, :2] = torch.tensor([8, 0])  # the first document; its end stays
    logits, other = (model(gpt_batch(rows, ALL, EOD))[0] for rows in (TOKENS, changed))
    assert torch.equal(logits[3:], other[3:])
    assert not torch.equal(logits[:3], other[:3])
    packed, leaking = (model(gpt_batch(rows))[0] for rows in (TOKENS, changed))
    assert not torch.equal(packed[3:], leaking[3:]), "the test could not fail"


def test_a_document_in_a_sample_has_the_logits_that_it_has_alone(group):
    model = network(group)
    logits = model(gpt_batch(TOKENS, ALL, EOD))[0]
    alone = torch.tensor([[4, 5, EOD, 0]])
    torch.testing.assert_close(logits[3:6], model(gpt_batch(alone))[0])


def test_a_sample_in_which_nothing_counts_has_no_loss(group):
    model, loss = network(group), next_token_loss(group)
    given = gpt_batch(torch.full((1, 5), EOD), ALL, EOD)
    value = loss(model(given), given)
    assert value == 0
    value.backward()
