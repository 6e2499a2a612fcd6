"""Partition of a network's list of layers into pipeline stages."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from megatron.common.errors import ConfigError
from megatron.config.architecture.architecture import Architecture, Entry
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.layout import ParallelPlan
from megatron.config.parallelism.pipeline import LAYERS, even_parts, layers_in

LAYER = "transformer"
"""What --pp-partition-method type:REGEX matches for every transformer layer, whatever its class."""

_ENCODER_NORM = "EncoderNormPipe"


def entries_of_rank(
    network: Architecture, spec: ModelSpec, parallel: ParallelPlan, *, mixed: bool
) -> list[Entry]:
    """Return the list of layers of a network, with the weights that a rank has of each.

    Args:
        mixed: whether logits are cast to 32 bits at the end.
    """
    tensor, expert = parallel.tensor, parallel.expert
    entries = network.entries(spec, tensor=tensor, expert=expert)
    if parallel.ranks_per_expert != tensor:
        experts = network.entries(spec, tensor=parallel.ranks_per_expert, expert=expert)
        entries = [
            replace(entry, weights=replace(entry.weights, experts=other.weights.experts))
            for entry, other in zip(entries, experts, strict=True)
        ]
    return entries + [Entry(name="to_float32")] * mixed


def bounds_of(entries: Sequence[Entry], parallel: ParallelPlan) -> list[int]:
    """Return the index of the first entry of each stage or chunk, and the number of entries."""
    if parallel.split_rank:
        return split_bounds(entries, parallel.pipeline, parallel.split_rank)
    if parallel.pipeline == 1:
        return [0, len(entries)]
    return stage_bounds(parallel.partition_method, entries, parallel.pipeline * parallel.chunks)


def stage_bounds(method: str, entries: Sequence[Entry], parts: int) -> list[int]:
    """Return the index of the first entry of each part, and the number of entries.

    With type:REGEX and layers:N,N,..., the entries after the last transformer layer stay together, so
    that the final norm is on the stage of the head.

    Args:
        method: as --pp-partition-method.
        entries: for the method "parameters" with their weights.
        parts: pipeline stages, or chunks of all.

    Raises:
        ConfigError: no entry matches type:REGEX; lists their names.
    """
    blocks = [i for i, entry in enumerate(entries) if entry.kind == "block"]
    head = (blocks[-1] if blocks else 0) + 1
    if method.startswith(LAYERS):
        firsts = [*accumulate(layers_in(method))][:-1]
        return [0, *([*blocks, head][first] for first in firsts), len(entries)]
    weights = tuple(unit_weights(method, entries))
    if set(weights) == {1}:
        return [0, *accumulate(even_parts(len(weights), parts))]
    bounds = partition_balanced(weights, parts)
    if not method.startswith("type:"):
        return bounds
    return [*(min(bound, head) for bound in bounds[:-1]), bounds[-1]]


def unit_weights(method: str, entries: Sequence[Entry]) -> list[int]:
    """Return the weight of each entry under a partition method.

    Raises:
        ConfigError: no entry matches type:REGEX; lists their names.
    """
    if method == "uniform":
        return [1] * len(entries)
    if not method.startswith("type:"):
        return [entry.weights.total for entry in entries]
    pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
    weights = [int(any(map(pattern.search, _names(entry)))) for entry in entries]
    if not any(weights):
        names = sorted({entry.name for entry in entries})
        raise ConfigError(
            f"--pp-partition-method {method} matches no layer; there are {', '.join(names)}; "
            f"type:{LAYER} matches all transformer layers"
        )
    return weights


def _names(entry: Entry) -> tuple[str, ...]:
    return (entry.name, LAYER) if entry.kind == "block" else (entry.name,)


def stage_problems(
    parallel: ParallelPlan, entries: Sequence[Entry], trained: Mapping[str, Container[int]]
) -> Iterator[str]:
    """Yield why a partition method cannot divide a network into the stages of a pipeline.

    Args:
        trained: by flags that train some weights of layers alone, the numbers of these layers, of which
            each stage needs one.
    """
    method, parts = parallel.partition_method, parallel.pipeline * parallel.chunks
    by_type = parallel.pipeline > 1 and not parallel.split_rank and method.startswith("type:")
    if by_type and parts > (units := sum(unit_weights(method, entries))):
        yield (
            f"--pipeline-model-parallel-size {parallel.pipeline} makes {parts} stages or chunks, and "
            f"--pp-partition-method {method} counts {units} layers: one would be empty"
        )
        return
    spans = [entries[start:stop] for start, stop in pairwise(bounds_of(entries, parallel))]
    stages = [
        {
            each.number
            for span in spans[stage :: parallel.pipeline]
            for each in span
            if each.kind == "block"
        }
        for stage in range(parallel.pipeline)
    ]
    for flags, numbers in trained.items():
        lacking = [
            stage for stage, found in enumerate(stages) if not any(map(numbers.__contains__, found))
        ]
        if lacking and parallel.pipeline == 1:
            yield f"{flags} trains no layer of this network: name others"
        elif lacking:
            yield (
                f"{flags} needs a layer to train on each stage, and --pp-partition-method {method} "
                f"leaves stage {lacking[0]} without one: write type:{LAYER}, fewer stages, or train "
                "other layers too"
            )


def split_bounds(entries: Sequence[Entry], stages: int, split: int) -> list[int]:
    """Return the bounds of stages where the decoder begins at the stage `split`.

    All encoder stages have the same number of layers, and so have all decoder stages.
    """
    blocks = [index for index, entry in enumerate(entries) if entry.kind == "block"]
    decoder = [entry.name for entry in entries].index(_ENCODER_NORM) + 1
    front, rear = ([i for i in blocks if (i < decoder) is first] for first in (True, False))
    front, rear = front[:: len(front) // split], rear[:: len(rear) // (stages - split)]
    return [0, *front[1:], decoder, *rear[1:], len(entries)]


@cache
def partition_balanced(weights: tuple[int, ...], parts: int) -> list[int]:
    """Return the bounds that make the heaviest part least heavier than the lightest.

    Ties fall as in DeepSpeed, whose stages these have to be: to the latest cut.

    Source: DeepSpeed's `partition_balanced`.
    """
    count = len(weights)
    if count <= parts:
        return [min(part, count) for part in range(parts + 1)]
    sums = [0, *accumulate(weights)]
    # By number of parts: {end: (heaviest, lightest, where the last part begins)}.
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0, float("inf"), 0)}]
    for _ in range(parts):
        before = best[-1]
        found: dict[int, tuple[float, float, int]] = {}
        for end in range(len(best), count + 1):
            for cut, (heaviest, lightest, _) in before.items():
                if cut >= end:
                    break
                last = sums[end] - sums[cut]
                high, low = max(heaviest, last), min(lightest, last)
                if end not in found or found[end][0] - found[end][1] >= high - low:
                    found[end] = high, low, cut
        best.append(found)
    bounds = [count]
    for choices in reversed(best[1:]):
        bounds.append(choices[bounds[-1]][2])
    return bounds[::-1]
