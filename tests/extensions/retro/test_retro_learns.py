"""Retro uses neighbors that hold the answer: its loss falls far below a GPT's, and not at all otherwise.

The documents are random tokens, each there twice in different places: the neighbor of a chunk is its
copy, and the continuation of the neighbor is the text to predict.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny import tiny_spec

from megatron.extensions.retro.objective import RETRO_FIELDS, Retro, retro_batch
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import CAUSAL_FIELDS, GPT, gpt_batch
from megatron.tensor_parallel.rng import OrdinaryStream

S, M, WORDS, STEPS = 8, 2, 12, 110
SPEC = tiny_spec(
    **{"architecture": "retro", "num_layers": 6, "retro_layers": (6,), "retro_encoder_layers": 1},
    **{"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "head_dim": 8},
    **{"seq_length": S, "max_position_embeddings": S, "query_key_layer_scaling": False},
    **{"vocab_size": WORDS, "padded_vocab_size": WORDS, "retro_chunk_length": M},
    **{"retro_num_neighbors": 1, "retro_retrieved_length": 2 * M},
)


def samples() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield tokens of batches, and for each chunk its copy with what follows it."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, WORDS, (16, S + M), generator=draw)
        chunks = tokens.unflatten(1, (-1, M))
        yield tokens[:, : S + 1], torch.cat([chunks[:, :-1], chunks[:, 1:]], -1)[:, :, None]


def last_loss(group, how: str) -> float:
    """Train, and return the mean loss of the last ten steps."""
    objective, spec, fields = Retro(), SPEC, RETRO_FIELDS
    if how == "gpt":
        spec = replace(SPEC, architecture="gpt", own=None)
        objective, fields = GPT(), CAUSAL_FIELDS
    model = SequentialModel(
        objective.layers(
            spec,
            LayerParts(
                group=group,
                rng=OrdinaryStream(),
                mixed=False,
                core_attention=core_attention_of(spec),
                batch_fields=tuple(fields),
            ),
        )
    )
    initialise(model, seed=1, std=0.1, num_layers=spec.num_layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loss_of, losses = next_token_loss(group), []
    for tokens, neighbors in samples():
        if how == "shuffled":
            neighbors = neighbors.roll(1, 0)
        lengths = torch.full(neighbors.shape[:3], 2 * M)
        batch = gpt_batch(tokens) if how == "gpt" else retro_batch(tokens, neighbors, lengths)
        loss = loss_of(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def test_neighbors_with_the_answer_are_used_and_shuffled_ones_are_not(group):
    retro, shuffled, gpt = (last_loss(group, how) for how in ("retro", "shuffled", "gpt"))
    # Nothing foretells the tokens of a sample but those that a neighbor continues with.
    assert gpt == pytest.approx(math.log(WORDS), abs=0.03)
    assert shuffled == pytest.approx(gpt, abs=0.03)
    assert retro < gpt / 4
