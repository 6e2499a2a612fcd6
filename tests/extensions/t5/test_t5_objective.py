"""Batches of T5 from samples of its dataset."""

import torch
from tiny import tiny_plan

from megatron.extensions.t5.objective import T5, T5_FIELDS, t5_batch


def test_a_batch_has_lengths_in_place_of_masks():
    """Labels of padding are a token that the loss mask leaves out, so that none is negative."""
    batch = t5_batch(
        text_enc=torch.tensor([[5, 9, 6, 0], [7, 9, 0, 0]]),
        text_dec=torch.tensor([[1, 9, 4], [1, 9, 0]]),
        labels=torch.tensor([[9, 4, 2], [9, 2, -1]]),
        loss_mask=torch.tensor([[1, 1, 1], [1, 1, 0]]),
        truncated=torch.tensor([0, 1]),
        enc_length=torch.tensor([3, 2]),
        dec_length=torch.tensor([3, 2]),
    )
    assert [*batch] == [*T5_FIELDS]
    assert batch["lengths"].tolist() == [3, 2]
    assert batch["labels"].tolist() == [[9, 4, 2], [9, 2, 0]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    letters = {"b": 2, "s": 4, "d": 3}
    for name, field in T5_FIELDS.items():
        assert batch[name].shape == field.sizes(letters)
        assert batch[name].dtype == field.dtype


def test_the_length_of_the_decoder_is_its_own():
    plan = tiny_plan("--decoder-seq-length", "4", objective="t5")
    assert T5().letters(plan.model) == {"d": 4}
    assert plan.model.positions.max_position_embeddings == 6
    assert plan.model.own.num_decoder_layers == plan.model.num_layers
