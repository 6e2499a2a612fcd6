"""Generation by a Retro with retrieved neighbors, against the network itself."""

from dataclasses import replace

import pytest
import torch
from encoders import random_weights
from tiny import tiny_spec

from megatron.inference.engine.continuous_batching import Engine
from megatron.inference.engine.model_runner import ModelRunner
from megatron.inference.engine.retro_runner import RetroRunner
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.loading.loaded_model import lone_groups
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.retro import retro_layers
from megatron.tensor_parallel.rng import OrdinaryStream

SPEC = tiny_spec(
    architecture="retro",
    tied_embeddings=False,
    num_layers=9,
    max_position_embeddings=16,
    seq_length=16,
    retro_layers=(6, 9),
    retro_encoder_layers=2,
    retro_chunk_length=3,
    retro_num_neighbors=2,
    retro_retrieved_length=6,
)
NEW = 5
REQUESTS = [
    ([1, 2, 3, 4, 5, 6, 7], [[3, 1, 4, 1, 5, 9], [2, 7]]),
    ([5], [[8, 8]]),
    ([9, 3], []),
    ([2, 2, 6], [[], [4, 9, 1, 1]]),
    ([7, 1, 7, 1, 7], [[6, 5, 4, 3, 2, 1], [1, 2, 3]]),
]


def runner_of(spec=SPEC, rows=2, cls=RetroRunner):
    return cls(
        spec,
        random_weights(spec),
        groups=lone_groups(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        rows=rows,
    )


def network_of(spec):
    steps = retro_layers(
        spec,
        group=lone_groups().tensor,
        rng=OrdinaryStream(),
        mixed=False,
        core_attention=core_attention_of(spec),
        batch_fields=["prompt_lengths"],
    )
    network = SequentialModel(steps).eval()
    weights = random_weights(spec)
    network.load_state_dict({name: each.weight.all() for name, each in weights.items()})
    return network


def plainly_continued(network, prompt, neighbors, count=NEW):
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
            best = network(batch)[0, -1, : SPEC.vocab_size].log_softmax(-1).max(-1)
        tokens.append(int(best.indices))
        logprobs.append(float(best.values))
    return tokens[len(prompt) :], pytest.approx(logprobs, abs=1e-4)


def generated(runner, *, rows, recompute=False):
    engine = Engine(runner, rows=rows, recompute=recompute)
    requests = [
        Request(
            prompt=tuple(prompt),
            neighbors=tuple(map(tuple, neighbors)),
            max_new_tokens=NEW - number % 2,
            sampling=SamplingParams(greedy=True),
            logprobs=True,
        )
        for number, (prompt, neighbors) in enumerate(REQUESTS)
    ]
    return [
        ([*done.tokens], [one.logprob for one in done.new_tokens])
        for done in engine.generate(requests)
    ]


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, position_embedding="rotary", rotary_dim=4)])
def test_texts_are_those_of_the_network(spec):
    """Sequences join, leave and move to other rows of the cache, and keep their own neighbors."""
    network = network_of(spec)
    expected = [
        plainly_continued(network, *request, count=NEW - number % 2)
        for number, request in enumerate(REQUESTS)
    ]
    assert generated(runner_of(spec), rows=2) == expected
    assert generated(runner_of(spec, rows=5), rows=5) == expected
    found = generated(runner_of(spec, rows=0), rows=3, recompute=True)
    assert found == expected
    alike = [
        plainly_continued(network, prompt, [], count=len(own[0])) == own
        for (prompt, _), own in zip(REQUESTS, found, strict=True)
    ]
    assert alike == [not any(neighbors) for _, neighbors in REQUESTS]


def test_neighbors_are_refused_by_other_networks():
    engine = Engine(runner_of(tiny_spec(), cls=ModelRunner), rows=1)
    request = Request(prompt=(1,), max_new_tokens=1, neighbors=((2,),))
    assert "attends to none" in "".join(engine.problems(request))
