"""Generation by a Retro with retrieved neighbors, against the network itself."""

import pytest
import torch
from encoders import random_weights
from retro_engines import (
    RETRO_PROMPTS,
    RETRO_REQUESTS,
    RETRO_SPEC,
    answers_of,
    retro_engine,
)
from stages import engine_of, random_model
from tiny import tiny_spec, with_changes

from megatron.extensions.retro.layers import retro_layers
from megatron.inference.engine.sequence import Request
from megatron.inference.loading.loaded_model import lone_groups
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.rng import OrdinaryStream


def network_of(spec):
    steps = retro_layers(
        spec,
        LayerParts(
            group=lone_groups().tensor,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=core_attention_of(spec),
            batch_fields=["prompt_lengths"],
        ),
    )
    network = SequentialModel(steps).eval()
    weights = random_weights(spec)
    network.load_state_dict({name: each.weight.all() for name, each in weights.items()})
    return network


def plainly_continued(network, prompt, neighbors, *, count):
    """Return the greedy continuation and its log-probabilities, each from a full forward pass."""
    texts = [*neighbors, [], []][:2]
    tokens, logprobs = [*prompt], []
    for _ in range(count):
        batch = {
            "tokens": torch.tensor([tokens]),
            "positions": torch.arange(len(tokens))[None],
            "neighbor_tokens": torch.tensor([[[text + [0] * (6 - len(text)) for text in texts]]]),
            "neighbor_lengths": torch.tensor([[[len(text) for text in texts]]]),
            "prompt_lengths": torch.tensor([len(prompt)]),
        }
        with torch.no_grad():
            best = network(batch)[0, -1, : RETRO_SPEC.vocabulary.vocab_size].log_softmax(-1).max(-1)
        tokens.append(int(best.indices))
        logprobs.append(float(best.values))
    return tokens[len(prompt) :], pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "spec", [RETRO_SPEC, with_changes(RETRO_SPEC, position_embedding="rotary", rotary_dim=4)]
)
def test_texts_are_those_of_the_network(spec):
    """Sequences join, leave and move to other rows of the cache, and keep their own neighbors."""
    network = network_of(spec)
    expected = [
        plainly_continued(network, *prompt, count=request.max_new_tokens)
        for prompt, request in zip(RETRO_PROMPTS, RETRO_REQUESTS, strict=True)
    ]
    assert answers_of(retro_engine(spec)) == expected
    assert answers_of(retro_engine(spec, rows=5)) == expected
    found = answers_of(retro_engine(spec, rows=3, recompute=True))
    assert found == expected
    alike = [
        plainly_continued(network, prompt, [], count=len(own[0])) == own
        for (prompt, _), own in zip(RETRO_PROMPTS, found, strict=True)
    ]
    assert alike == [not any(neighbors) for _, neighbors in RETRO_PROMPTS]


def test_neighbors_are_refused_by_other_networks(group):
    spec = tiny_spec()
    engine = engine_of(random_model(group, spec), spec, rows=1)
    request = Request(prompt=(1,), max_new_tokens=1, contexts=((2,),))
    assert "attends to none" in "".join(engine.problems(request))
