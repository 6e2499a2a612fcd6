"""Ranks that share a model write what one process with all of it writes."""

from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import TIMEOUT_S, run_on_ranks
from stages import completed, engine_of, random_model
from tiny import tiny_spec

from megatron.config.network.model_spec import flat
from megatron.inference.engine.beam_search import Beam, BeamSearchRequest
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.prefix_cache import PrefixCache
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Completion, Event, Request
from megatron.inference.server.engine_thread import EngineThread
from megatron.tensor_parallel.object_collectives import broadcast_object
from megatron.tensor_parallel.process_groups import (
    build_groups,
    control_group,
    lone_group,
)
from megatron.tensor_parallel.topology import Topology

SPECS = {
    "bloom": tiny_spec(
        position_embedding="alibi",
        embed_layernorm=True,
        max_position_embeddings=12,
        padded_vocab_size=11,  # no multiple of two ranks
    ),
    "llama": tiny_spec(
        position_embedding="rotary",
        rotary_dim=4,
        normalization="RMSNorm",
        activation="swiglu",
        num_attention_heads=4,
        num_query_groups=2,
        linear_bias=False,
        tied_embeddings=False,
        num_layers=3,
        window=4,
        fp32_residual=True,
        max_position_embeddings=12,
    ),
}
SEARCH = BeamSearchRequest(prompt=(1, 2, 3), width=3, max_new_tokens=4, stop_tokens=frozenset({5}))
OPTIONS = [
    SamplingParams(greedy=True),
    SamplingParams(temperature=2.0),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.9),
]
REQUESTS = [
    Request(
        prompt=tuple(range(1, 2 + i)),
        max_new_tokens=3 + i,
        sampling=OPTIONS[i % 4],
        seed=i,
        logprobs=True,
        prompt_logprobs=i == 1,
        top_logprobs=2,
    )
    for i in range(6)
]
REQUESTS += [
    Request(
        prompt=(1, 2, 2, 3),
        max_new_tokens=6,
        sampling=SamplingParams(
            temperature=1.5,
            min_p=0.01,
            repetition_penalty=1.3,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias=((4, 1.5),),
        ),
        seed=7,
        logprobs=True,
        stop_tokens=frozenset({0, 9}),
        min_new_tokens=3,
    ),
    Request(prompt=(1, 2, 3, 1, 2, 3, 1), max_new_tokens=5, sampling=OPTIONS[0], logprobs=True),
]


def written(engine: InferenceEngine) -> tuple[list[Completion], list[Beam]]:
    return completed(engine, *REQUESTS), engine.run_alone(SEARCH)


def served(engine: InferenceEngine) -> tuple[list[Completion], list[Beam]]:
    """Return what `written` does, by way of a thread that gives the engine work."""
    loop = EngineThread(engine, queue=99)
    reported: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    events: list[list[Event]] = [[] for _ in REQUESTS]
    loop.start()
    loop.submit([*REQUESTS, SEARCH], lambda index, event: reported.put((index, event)))
    beams: list[Beam] = []
    while not beams or not all(row and row[-1].finish_reason for row in events):
        index, event = reported.get(timeout=TIMEOUT_S)
        if index == len(REQUESTS):
            beams = event
        else:
            events[index].append(event)
    loop.close()
    return [completion(r, row) for r, row in zip(REQUESTS, events, strict=True)], beams


def completion(request: Request, events: list[Event]) -> Completion:
    return Completion(
        prompt=request.prompt,
        new_tokens=tuple(event.new_token for event in events if event.new_token),
        finish_reason=events[-1].finish_reason or "cancelled",
        prompt_tokens=events[0].prompt_tokens,
    )


def write_together(rank: int, expected: dict[str, Any]) -> None:
    PrefixCache.least_tokens = 2  # in this process, which runs nothing else
    group = lone_group()
    spec = SPECS["bloom"]
    even = tiny_spec(**flat(spec) | {"padded_vocab_size": 12})
    for layout, messages in (
        (Topology(pipeline=1, data=1, tensor=2), 4),  # one for each step, and one to close
        (Topology(pipeline=2, data=1, tensor=1), 7),  # and one for the last stage's tokens
    ):
        groups = build_groups(layout)
        control = control_group(groups, timedelta(minutes=5))
        engine = engine_of(random_model(group, spec), even, groups=groups, control=control)
        assert messages_of(engine) == messages
        exchange(control)
    for name, spec in SPECS.items():
        model = random_model(group, spec)
        even = tiny_spec(**flat(spec) | {"padded_vocab_size": 12})
        for layout in (
            Topology(pipeline=1, data=1, tensor=2),
            Topology(pipeline=2, data=1, tensor=1),
        ):
            for sees_prefix, recompute in ((False, False), (False, True), (True, False)):
                engine = engine_of(
                    model,
                    even,
                    rows=3,
                    groups=build_groups(layout),
                    sees_prefix=sees_prefix,
                    recompute=recompute,
                    batched_tokens=3,
                    draft_tokens=0 if sees_prefix or recompute else 2,
                )
                if rank:
                    engine.follow()
                    continue
                if sees_prefix or recompute:
                    (done,) = completed(engine, REQUESTS[0])
                    assert len(done.tokens) == REQUESTS[0].max_new_tokens
                else:
                    require_equal(*written(engine), *expected[name])
                    require_equal(*served(engine), *expected[name])
                    assert engine.counters.reused_prompt_tokens
                    assert engine.counters.accepted_tokens
                engine.close()


def messages_of(engine: InferenceEngine) -> int:
    """Return the number of broadcasts of the three steps of a request, and of closing."""
    counted = Counted()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", counted)
        if engine.runner.groups.rank:
            engine.follow()
        else:
            (done,) = completed(engine, Request(prompt=(1, 2), max_new_tokens=3))
            assert len(done.tokens) == 3
            engine.close()
    return counted.calls


class Counted:
    """Counts the messages between hosts."""

    def __init__(self) -> None:
        self.calls, self._broadcast = 0, dist.broadcast

    def __call__(self, tensor: torch.Tensor, **options: Any) -> None:
        assert tensor.device.type == "cpu"
        self.calls += 1
        self._broadcast(tensor, **options)


def exchange(group: dist.ProcessGroup) -> None:
    """Broadcast objects of one packet, of exactly one, and of several."""
    for value in (None, ["text"], b"0" * 16_000, b"1" * 16_384, list(range(20_000))):
        own = value if dist.get_rank() == 1 else None
        assert broadcast_object(own, source=1, group=group) == value


def require_equal(
    texts: list[Completion], beams: list[Beam], other: list[Completion], expected: list[Beam]
) -> None:
    assert [done.tokens for done in texts] == [done.tokens for done in other]
    assert [beam.tokens for beam in beams] == [beam.tokens for beam in expected]
    for own, there in zip(texts, other, strict=True):
        reported = [*own.prompt_logprobs, *(choice.logprob for choice in own.new_tokens)]
        assert reported == pytest.approx(
            [*there.prompt_logprobs, *(choice.logprob for choice in there.new_tokens)], abs=1e-4
        )


def test_tensor_and_pipeline_ranks_write_what_one_process_writes(
    group: object, tmp_path: Path
) -> None:
    expected: dict[str, Any] = {
        name: written(engine_of(random_model(group, spec), spec, rows=3))
        for name, spec in SPECS.items()
    }
    run_on_ranks(2, write_together, tmp_path, expected)
