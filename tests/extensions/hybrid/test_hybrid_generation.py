"""Generation with hybrid networks: sequences that join, leave, move and are copied keep their states."""

import pytest
import torch
from problems import problem
from recorded_graph import record
from stages import completed, engine_of, plain_logits, plainly_continued, random_model
from test_hybrid import of_pattern

from megatron.common.errors import ConfigError
from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request

PROMPTS = [(1, 2, 3, 4, 5), (6, 7), (8,), (3, 1, 4, 1, 5, 9, 2), (2, 2)]
REQUESTS = [
    Request(prompt=prompt, max_new_tokens=4 + number, sampling=SamplingParams(greedy=True))
    for number, prompt in enumerate(PROMPTS)
]


@pytest.mark.parametrize("pattern", ["MG*-", "MG*E", "MM", "GG"])
def test_greedy_tokens_are_those_without_states(group, pattern):
    spec = of_pattern(pattern)
    model = random_model(group, spec)
    expected = [plainly_continued(model, spec, r.prompt, r.max_new_tokens) for r in REQUESTS]
    assert len({token for tokens in expected for token in tokens}) > 3
    # Without their kernel, experts read numbers of tokens on the host, which no capture repeats.
    captured = [] if "E" in pattern else [{"rows": 3, "key_rounding": 4, "capture": record}]
    for options in ({"rows": 3}, {"rows": 1}, {"rows": 3, "recompute": True}, *captured):
        engine = engine_of(model, spec, **options)
        assert [[*done.tokens] for done in completed(engine, *REQUESTS)] == expected, options


def test_beams_copy_states(group):
    spec = of_pattern("MG*-E")
    model = random_model(group, spec)
    beams = engine_of(model, spec, rows=3).run_alone(BeamSearchRequest.of(REQUESTS[0], 3, 1.0))
    assert len({beam.tokens for beam in beams}) == 3
    for beam in beams:
        prompt = REQUESTS[0].prompt
        table = plain_logits(model, spec, prompt + beam.tokens).log_softmax(-1)
        chosen = table[len(prompt) - 1 : -1].gather(1, torch.tensor(beam.tokens)[:, None])
        assert beam.score == pytest.approx(float(chosen.mean()), rel=1e-4)


def test_prompts_are_computed_in_one_pass_and_nothing_is_proposed(group):
    spec = of_pattern("M*")
    model = random_model(group, spec)
    engine = engine_of(model, spec, prefix_caching=True)
    long = Request(prompt=(1, 2) * 8, max_new_tokens=2)
    for _ in range(2):
        completed(engine, long)
    assert engine.runner.no_extension == "a layer keeps a state of each sequence"
    assert engine.counters.reused_prompt_tokens == 0
    with problem("--prompt-lookup-num-tokens", ConfigError):
        engine_of(model, spec, draft_tokens=2)
