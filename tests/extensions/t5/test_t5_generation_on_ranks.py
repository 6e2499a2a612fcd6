"""Ranks that share a T5 write what one process writes."""

from pathlib import Path

from encoders import BOS, EOS, SENTINEL, A, B, C, D
from ranks import run_on_ranks
from t5_engines import T5_SPEC, t5_engine
from tiny import with_changes

from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.tensor_parallel.process_groups import build_groups
from megatron.tensor_parallel.topology import Topology

RELATIVE = with_changes(
    T5_SPEC,
    **{"position_embedding": "relative", "relative_buckets": 4, "relative_max_distance": 5},
    **{"padded_vocab_size": 14, "num_query_groups": 2},
)
T5_REQUESTS = [
    Request(
        prompt=(BOS,),
        contexts=(source,),
        max_new_tokens=5,
        sampling=sampling,
        seed=seed,
        stop_tokens=frozenset({EOS}),
    )
    for sampling in (SamplingParams(greedy=True), SamplingParams(temperature=2.0))
    for source, seed in (((A, B, C), "1"), ((D,), "2"), ((C, SENTINEL), "3"))
]


def texts_of(engine: InferenceEngine) -> list[tuple[int, ...]]:
    """Return what a T5 generates, the texts of beam searches last."""
    sampled = [done.tokens for done in engine.generate(T5_REQUESTS)]
    searches = [BeamSearchRequest.of(request, 3, 1.0) for request in T5_REQUESTS[:3]]
    return sampled + [engine.run_alone(search)[0].tokens for search in searches]


def write_together(rank: int, expected: list[tuple[int, ...]]) -> None:
    groups = build_groups(Topology(pipeline=1, data=1, tensor=2))
    t5 = t5_engine(RELATIVE, rows=3, groups=groups)
    if rank:
        t5.follow()
        return
    t5.step()
    search = BeamSearchRequest.of(T5_REQUESTS[0], 3, 1.0)
    assert t5.run_alone(search, lambda: False) == []
    assert texts_of(t5) == expected
    t5.close()


def test_tensor_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    run_on_ranks(2, write_together, tmp_path, texts_of(t5_engine(RELATIVE, rows=3)))
