"""Decode steps with static shapes: captured once for each shape, replayed, without host syncs."""

import logging
from dataclasses import replace

import pytest
import torch
from host_syncs import CudnnAttention, HostSyncs
from recorded_graph import record
from stages import completed, engine_of, random_model
from test_continuous_batching import NETWORKS, SIZES, prompts, request_of
from tiny import LLAMA, tiny_spec, with_changes

from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.evaluation.scoring import Window, score_windows
from megatron.inference.loading.loaded_model import lone_groups
from megatron.inference.runner.decode_graphs import StepShape, decode_capture, step_shape
from megatron.tensor_parallel.topology import Topology

LIMITS = {"rows": 12, "max_length": 1000, "has_windows": False}
SAMPLINGS = [
    SamplingParams(greedy=True),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=9, temperature=1.5),
    SamplingParams(top_p=0.95),
    SamplingParams(min_p=0.01, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(logit_bias=((4, 1.5),)),
]


def test_shapes_of_steps_are_few():
    def shape(positions, rounding, **changes):
        return step_shape(positions, rounding=rounding, **(LIMITS | changes))

    assert shape([7, 7], 1) == StepShape(2, 7, 8, is_even=True)
    assert shape([7, 9, 8], 1) == StepShape(3, 7, 10)
    assert shape([7, 255], 256) == shape([0, 3], 256) == StepShape(2, 0, 256)
    assert shape([600] * 3, 256) == StepShape(4, 0, 768)
    assert shape([600] * 3, 256, has_windows=True) == StepShape(4, 512, 768)
    assert shape([999] * 5, 256) == StepShape(8, 0, 1000)
    assert shape([1] * 9, 256).rows == 12 and shape([1] * 9, 256, rows=64).rows == 16


@pytest.mark.parametrize("changes", NETWORKS.values(), ids=NETWORKS)
@torch.inference_mode()
def test_padded_steps_compute_what_exact_ones_do(group, changes):
    spec = tiny_spec(**(SIZES | changes))
    model = random_model(group, spec)
    exact, padded, replayed = (
        engine_of(model, spec, rows=4, **options).runner
        for options in ({}, {"key_rounding": 5}, {"key_rounding": 5, "capture": record})
    )
    texts = [[1, 2, 3, 4, 5], [6, 7], [8]]
    features = [one.prefill(texts, [5, 2, 1]) for one in (exact, padded, replayed)]
    for step in range(6):
        tokens = [(7 * step + row) % spec.vocabulary.vocab_size for row in range(len(texts))]
        positions = [len(text) + step for text in texts]
        features = [one.decode(tokens, positions) for one in (exact, padded, replayed)]
        expected = exact.logits(features[0][:, 0])
        for one, found in ((padded, features[1]), (replayed, features[2])):
            logits = one.logits(found[:, 0])
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
            assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_replays_serve_sequences_that_join_and_leave(group):
    spec = tiny_spec(**SIZES | LLAMA)
    model = random_model(group, spec)
    requests = [
        request_of(prompt, new, sampling=SAMPLINGS[new % len(SAMPLINGS)], seed=new)
        for new, prompt in enumerate(prompts(9), start=2)
    ]
    captures = []

    def capture(function):
        captures.append(function)
        return record(function)

    static = engine_of(model, spec, rows=5, key_rounding=4, capture=capture)
    expected = completed(engine_of(model, spec, rows=5), *requests)
    assert completed(static, *requests) == expected
    shapes = len(captures)
    assert 3 < shapes <= 12  # at most 1, 2, 4, 5 rows with 4, 8, 12, 14 keys
    assert completed(static, *requests) == expected
    assert len(captures) == shapes
    search = BeamSearchRequest(prompt=(1, 2, 3), width=5, max_new_tokens=6)
    assert [beam.tokens for beam in static.run_alone(search)] == [
        beam.tokens for beam in engine_of(model, spec, rows=5).run_alone(search)
    ]


def test_failed_captures_are_reported_and_steps_run_uncaptured(group, caplog):
    spec = tiny_spec(**SIZES)
    model = random_model(group, spec)

    def refuse(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = engine_of(model, spec, key_rounding=4, capture=refuse)
    requests = [request_of(prompt) for prompt in prompts()]
    with caplog.at_level(logging.WARNING):
        found = completed(engine, *requests)
    assert found == completed(engine_of(model, spec), *requests)
    (warning,) = caplog.messages
    assert "without CUDA graphs: operation not permitted" in warning


def test_free_rows_do_not_poison_the_sequences_that_take_them(group):
    """Padding has token 0: NaN in its embedding stays away from rows without it."""
    spec = tiny_spec(**SIZES | LLAMA)
    model = random_model(group, spec)
    without_it = SamplingParams(greedy=True, logit_bias=((0, -100.0),))
    requests = [
        request_of(prompt, 7, sampling=without_it)
        for prompt in ((1, 2, 3), (4, 5, 2), (6, 9, 9), (2,))
    ]
    expected = [[*done.tokens] for done in completed(engine_of(model, spec, rows=1), *requests)]
    with torch.no_grad():
        dict(model.named_parameters())["1.word_embeddings.weight"][0] = torch.nan
    engine = engine_of(model, spec, rows=4, key_rounding=8)
    tokens = {engine.add(request): [] for request in requests[:3]}
    while engine.is_busy:
        for event in engine.step():
            tokens[event.request_id].append(event.new_token and event.new_token.token)
        if len(tokens) == 3 and len(tokens[1]) == 3:
            tokens[engine.add(requests[3])] = []  # takes the row of padding
    assert [*tokens.values()] == expected


@pytest.mark.parametrize("capture", [None, record])
def test_a_step_has_one_host_sync(group, capture):
    spec = tiny_spec(**SIZES | {"scaled_embedding": True, "max_position_embeddings": 64})
    engine = engine_of(random_model(group, spec), spec, rows=8, key_rounding=64, capture=capture)
    for i, sampling in enumerate(SAMPLINGS):
        engine.add(
            request_of(
                (1, 2, 3)[: 1 + i % 3],
                40,
                sampling=sampling,
                seed=i,
                logprobs=i % 2 == 0,
                top_logprobs=i % 3,
                min_new_tokens=40,
                stop_tokens=frozenset({5}),
            )
        )
    engine.step(), engine.step()  # prefill, and the step that is captured
    for _ in range(3):
        with HostSyncs() as syncs:
            assert len(engine.step()) == len(SAMPLINGS)
        assert +syncs.found == {"tolist": 1}


def test_graphs_are_for_one_stage_without_plugins(group, caplog):
    alone, spec, gpu = lone_groups(), tiny_spec(**SIZES), torch.device("cuda")
    staged = replace(alone, topology=Topology(pipeline=2, data=1, tensor=1))
    divided = replace(alone, topology=Topology(pipeline=1, data=1, tensor=2))
    plugins = with_changes(spec, attention="mine")
    for network, groups, reason in (
        (spec, staged, "pipeline stages"),
        (spec, divided, "gloo"),
        (plugins, alone, "mine is a plugin's"),
    ):
        caplog.clear()
        assert decode_capture(network, groups, gpu) is None
        assert "without CUDA graphs" in caplog.text and reason in caplog.text
    caplog.clear()
    assert decode_capture(spec, alone, torch.device("cpu")) is None and not caplog.text


def test_attention_of_inference_never_uses_cudnn(group):
    spec = tiny_spec(**SIZES)
    engine = engine_of(random_model(group, spec), spec)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with CudnnAttention() as attention:
        completed(engine, request_of((1, 2)))
        score_windows(engine.runner, [Window((1, 2, 3), 2)], [[0]])
    assert attention.allowed == [False] * 6 * spec.num_layers
    assert torch.backends.cuda.cudnn_sdp_enabled()
