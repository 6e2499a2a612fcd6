"""A small BERT memorises masked tokens, and finds out which segment comes first."""

import torch
from tiny import tiny_spec

from megatron.extensions.bert.objective import BERT, BERT_FIELDS, bert_batch, bert_loss
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.rng import OrdinaryStream

CLS, SEP, MASK, LENGTH, WORDS = 2, 3, 4, 16, 30


def samples(count):
    """Return samples of two segments: words of the one that comes first in a text are the lower."""
    words = torch.randint(5, 5 + WORDS // 2, (count, LENGTH))
    swapped = torch.randint(0, 2, (count,))
    middle = torch.randint(6, 10, (count, 1))
    places = torch.arange(LENGTH)
    is_second = (places > middle).long()
    words = words + WORDS // 2 * (is_second ^ swapped[:, None])
    words = words.masked_fill(places == 0, CLS)
    words = words.masked_fill((places == middle) | (places == LENGTH - 1), SEP)
    masked = (torch.rand(count, LENGTH) < 0.15) & (words > MASK)
    return bert_batch(
        text=words.masked_fill(masked, MASK),
        types=is_second,
        labels=words.masked_fill(~masked, -1),
        is_random=swapped,
        loss_mask=masked.long(),
        padding_mask=torch.ones_like(words),
        truncated=torch.zeros(count, dtype=torch.int64),
    )


def test_64_samples_are_memorised_and_the_order_of_new_ones_is_known(group):
    spec = tiny_spec(
        **{"hidden_size": 48, "ffn_hidden_size": 96, "num_attention_heads": 4, "head_dim": 12},
        **{"vocab_size": 36, "padded_vocab_size": 36, "seq_length": LENGTH},
        **{"max_position_embeddings": LENGTH, "architecture": "bert"},
        **{"num_token_types": 2, "binary_head": True},
    )
    model = SequentialModel(
        BERT().layers(
            spec,
            LayerParts(
                group=group,
                rng=OrdinaryStream(),
                mixed=False,
                core_attention=lambda number: attention_of(spec, REFERENCE),
                batch_fields=tuple(BERT_FIELDS),
            ),
        )
    )
    initialise(model, seed=1, std=0.05, num_layers=spec.num_layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss, learned, new = bert_loss(group), samples(64), samples(64)
    for _ in range(200):
        optimizer.zero_grad()
        loss(model(learned), learned).total.backward()
        optimizer.step()
    assert loss(model(learned), learned).terms["lm loss"] < 0.1
    assert loss(model(learned), learned).terms["sop loss"] < 0.1
    assert loss(model(new), new).terms["sop loss"] < 0.1
