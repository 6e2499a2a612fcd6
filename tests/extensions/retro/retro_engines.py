"""A tiny Retro with random weights, and requests to it."""

from encoders import of_ranks, random_weights
from tiny import tiny_spec

from megatron.config.network.model_spec import ModelSpec
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.runner.model_runner import ModelRunner
from megatron.tensor_parallel.process_groups import Groups

RETRO_SPEC = tiny_spec(
    **{"architecture": "retro", "num_layers": 9, "retro_layers": (6, 9), "retro_encoder_layers": 2},
    **{"retro_chunk_length": 3, "retro_num_neighbors": 2, "retro_retrieved_length": 6},
    **{"seq_length": 16, "max_position_embeddings": 16, "tied_embeddings": False},
)
RETRO_PROMPTS = [
    ([1, 2, 3, 4, 5, 6, 7], [[3, 1, 4, 1, 5, 9], [2, 7]]),
    ([5], [[8, 8]]),
    ([9, 3], []),
    ([2, 2, 6], [[], [4, 9, 1, 1]]),
    ([7, 1, 7, 1, 7], [[6, 5, 4, 3, 2, 1], [1, 2, 3]]),
]
"""Prompts with their neighbors."""
RETRO_REQUESTS = [
    Request(
        prompt=tuple(prompt),
        contexts=tuple(map(tuple, neighbors)),
        max_new_tokens=5 - number % 2,
        sampling=SamplingParams(greedy=True),
        logprobs=True,
    )
    for number, (prompt, neighbors) in enumerate(RETRO_PROMPTS)
]


def retro_engine(
    spec: ModelSpec = RETRO_SPEC,
    *,
    rows: int = 2,
    recompute: bool = False,
    groups: Groups | None = None,
) -> InferenceEngine:
    cache = 0 if recompute else rows
    runner = ModelRunner(spec, random_weights(spec), rows=cache, **of_ranks(groups))
    return InferenceEngine(runner, rows=rows, recompute=recompute)


def answers_of(engine: InferenceEngine) -> list[tuple[list[int], list[float | None]]]:
    """Return the tokens and log-probabilities that a Retro generates for RETRO_REQUESTS."""
    done = engine.generate(RETRO_REQUESTS)
    return [([*each.tokens], [one.logprob for one in each.new_tokens]) for each in done]
