"""BERT's batches and its two losses."""

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_spec
from torch.testing import assert_close

from megatron.extensions.bert.layers import BertOutput
from megatron.extensions.bert.objective import BERT, BERT_FIELDS, bert_batch, bert_loss

SAMPLES = {
    "text": torch.tensor([[2, 7, 4, 3, 9, 3], [2, 4, 3, 0, 0, 0]]),
    "types": torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 5, 5, 5]]),
    "labels": torch.tensor([[-1, -1, 8, -1, -1, -1], [-1, 6, -1, -1, -1, -1]]),
    "is_random": torch.tensor([1, 0]),
    "loss_mask": torch.tensor([[0, 0, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]),
    "padding_mask": torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]]),
    "truncated": torch.tensor([0, 0]),
}


def losses(group, batch, binary_head=True):
    torch.manual_seed(1)
    output = BertOutput(torch.randn(2, 6, 12), torch.randn(2, 2) if binary_head else None)
    return output, bert_loss(group, vocab_size=11)(output, batch)


def test_a_batch_has_the_declared_fields_and_spans_of_real_tokens():
    batch = bert_batch(**SAMPLES)
    for name, field in BERT_FIELDS.items():
        assert batch[name].shape == field.sizes({"b": 2, "s": 6})
        assert batch[name].dtype == field.dtype
    assert list(batch) == list(BERT_FIELDS)
    assert batch["attention_span"].tolist() == [[[0, 6]], [[0, 3]]]
    # Padding may have a type that the table has no row for, and no label.
    assert batch["token_types"][1].tolist() == [0] * 6
    assert int(batch["labels"].min()) == 0


def test_the_loss_is_that_of_masked_tokens_and_of_the_order(group):
    output, (total, terms) = losses(group, bert_batch(**SAMPLES))
    logits = output.logits[..., :11]
    masked = [F.cross_entropy(logits[0, 2], torch.tensor(8))]
    masked += [F.cross_entropy(logits[1, 1], torch.tensor(6))]
    assert_close(terms["lm loss"], torch.stack(masked).mean())
    assert_close(terms["sop loss"], F.cross_entropy(output.order_logits, SAMPLES["is_random"]))
    assert_close(total, terms["lm loss"] + terms["sop loss"])
    assert terms["micro-batches without masked tokens"] == 0


def test_a_micro_batch_without_a_masked_token_is_counted_and_not_nan(group):
    nothing = torch.zeros(2, 6, dtype=torch.int64)
    batch = bert_batch(**{**SAMPLES, "loss_mask": nothing, "labels": nothing - 1})
    _, (total, terms) = losses(group, batch)
    assert (terms["lm loss"], terms["micro-batches without masked tokens"]) == (0, 1)
    assert_close(total, terms["sop loss"])


@pytest.mark.parametrize("binary_head", [True, False])
def test_terms_are_the_declared_ones(group, binary_head):
    _, (_, terms) = losses(group, bert_batch(**SAMPLES), binary_head)
    spec = tiny_spec(architecture="bert", binary_head=binary_head)
    assert {*terms} == {*BERT().loss_terms(spec)}
