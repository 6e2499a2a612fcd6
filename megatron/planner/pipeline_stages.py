"""Layers of each pipeline stage: DeepSpeed's partition, without DeepSpeed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from megatron.config.network.model_spec import ModelSpec
from megatron.config.plan import Plan
from megatron.planner.weights import (
    embedding_weights,
    head_weights,
    layer_weights,
    norm_width,
    output_weights,
    relative_weights,
    task_head,
)

_LAYER = "ParallelTransformerLayerPipe"
_DECODER_LAYER = "ParallelTransformerDecoderLayerPipe"
_RETRO_LAYER = "ParallelTransformerRetroLayerPipe"
_BLOCKS = (_LAYER, _DECODER_LAYER, _RETRO_LAYER)
_EMBEDDINGS = ("EmbeddingPipe", "WordEmbeddingPipe", "RetroEmbeddingPipe")
_ENCODER_NORM = "EncoderNormPipe"
_TABLES = {
    "gpt": "OutputEmbeddingPipe",
    "bert": "MaskedLMLogitsPipe",
    "t5": "OutputEmbeddingPipe",
    "retro": "OutputEmbeddingPipe",
}
"""The layer of the logits, by architecture."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers of one pipeline stage, or of a chunk of it."""

    index: int
    layers: tuple[int, ...]  # numbers from 1 on; those of a decoder follow the encoder's
    has_embedding: bool
    has_final_norm: bool
    has_head: bool
    has_encoder_norm: bool = False
    num_relative_tables: int = 0
    chunks: tuple["Stage", ...] = ()  # its virtual stages; empty with the schedule 1F1B

    @property
    def parts(self) -> tuple["Stage", ...]:
        """Its chunks, or itself if it is one."""
        return self.chunks or (self,)


def stages_of(plan: Plan) -> list[Stage]:
    """Return the stages of the network, in order; one without a pipeline."""
    parts, ranks = _virtual_stages(plan), plan.parallel.pipeline
    if plan.parallel.chunks == 1:
        return parts
    return [_joined(rank, tuple(parts[rank::ranks])) for rank in range(ranks)]


def _joined(index: int, chunks: tuple[Stage, ...]) -> Stage:
    return Stage(
        index=index,
        layers=tuple(number for chunk in chunks for number in chunk.layers),
        has_embedding=any(chunk.has_embedding for chunk in chunks),
        has_final_norm=any(chunk.has_final_norm for chunk in chunks),
        has_head=any(chunk.has_head for chunk in chunks),
        chunks=chunks,
    )


def _virtual_stages(plan: Plan) -> list[Stage]:
    """Return the parts that the partition cuts: stages, or chunks of stages."""
    names = entry_names(plan.model, mixed=plan.precision.is_mixed)
    bounds = [0, len(names)]
    if plan.parallel.pipeline > 1:
        weights = _entry_weights(plan, names)
        bounds = _partition(tuple(weights), plan.parallel.pipeline * plan.parallel.chunks)
        if plan.parallel.split_rank:
            bounds = split_bounds(names, plan.parallel.pipeline, plan.parallel.split_rank)
    blocks = [index for index, name in enumerate(names) if name in _BLOCKS]
    stages = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        own = [number for number, index in enumerate(blocks, 1) if start <= index < stop]
        held = names[start:stop]
        stages.append(
            Stage(
                index=index,
                layers=tuple(own),
                has_embedding=any(name in held for name in _EMBEDDINGS),
                has_final_norm=plan.model.normalization in held,
                has_head=_head(plan.model) in held,
                has_encoder_norm=_ENCODER_NORM in held,
                num_relative_tables=held.count("RelativePositionsPipe"),
            )
        )
    return stages


def entry_names(spec: ModelSpec, *, mixed: bool) -> list[str]:
    """Return the names of the entries of the list of layers, as the partition matches them.

    Args:
        mixed: whether logits are cast to 32 bits at the end.
    """
    embedding = ["EmbeddingPipe", "to_sequence_first"]
    decoder, before, behind = [], [], []
    if spec.architecture == "retro":
        embedding[0] = "RetroEmbeddingPipe"
    if spec.architecture == "bert" and not spec.num_outputs:
        before, behind = ["BertHeadPipe"], ["MaskedLMBiasPipe"]
    if spec.architecture == "t5":
        positions = "RelativePositionsPipe" if spec.relative_buckets else "PositionEmbeddingPipe"
        embedding = ["WordEmbeddingPipe", positions]
        layers = [_DECODER_LAYER] * spec.num_decoder_layers
        decoder, behind = [_ENCODER_NORM, *embedding, *layers], ["OutputBiasPipe"]
    return [
        "take_tokens" if spec.num_choices == 1 else "rows_of_choices",
        *embedding,
        *(
            _RETRO_LAYER if number in spec.retro_layers else _LAYER
            for number in range(1, spec.num_layers + 1)
        ),
        *decoder,
        "to_batch_first",
        spec.normalization if spec.final_norm else "no_final_norm",
        *before,
        _head(spec),
        *behind,
        *(["to_float32"] if mixed else []),
    ]


def _head(spec: ModelSpec) -> str:
    """Return the layer of the logits."""
    return task_head(spec) if spec.num_outputs else _TABLES[spec.architecture]


def split_bounds(names: Sequence[str], stages: int, split: int) -> list[int]:
    """Return the bounds of stages where the decoder begins at the stage `split`.

    Stages of the encoder have as many of its layers each, and so have those of the decoder.

    Args:
        names: of the entries of the list of layers.
    """
    decoder = names.index(_ENCODER_NORM) + 1
    encoder_cuts = _cuts(names, _LAYER, split)
    decoder_cuts = _cuts(names, _DECODER_LAYER, stages - split)
    return [0, *encoder_cuts[1:], decoder, *decoder_cuts[1:], len(names)]


def _cuts(names: Sequence[str], layer: str, parts: int) -> list[int]:
    """Return the index of the first of each of `parts` equal shares of the entries `layer`."""
    indices = [index for index, name in enumerate(names) if name == layer]
    return indices[:: len(indices) // parts]


def _entry_weights(plan: Plan, names: Sequence[str]) -> list[int]:
    method, spec, tensor = plan.parallel.partition_method, plan.model, plan.parallel.tensor
    if method == "uniform":
        return [1] * len(names)
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        return [1 if pattern.search(name) else 0 for name in names]
    numbers = iter(range(1, spec.num_layers + spec.num_decoder_layers + 1))
    sizes = {
        **dict.fromkeys(_EMBEDDINGS, embedding_weights(spec, tensor=tensor)),
        "WordEmbeddingPipe": head_weights(spec, tensor=tensor),
        "PositionEmbeddingPipe": spec.max_position_embeddings * spec.hidden_size,
        "RelativePositionsPipe": relative_weights(spec, tensor=tensor),
        _ENCODER_NORM: norm_width(spec, spec.hidden_size),
        _head(spec): head_weights(spec, tensor=tensor),
        **output_weights(spec, tensor=tensor),
        spec.normalization: norm_width(spec, spec.hidden_size),
    }
    return [
        layer_weights(spec, next(numbers), tensor=tensor, expert=plan.parallel.expert).total
        if name in _BLOCKS
        else sizes.get(name, 0)
        for name in names
    ]


@cache
def _partition(weights: tuple[int, ...], parts: int) -> list[int]:
    if set(weights) == {1}:
        return _even(len(weights), parts)
    return balanced(weights, parts)


def _even(items: int, parts: int) -> list[int]:
    """Return bounds of parts of equal length; the first ones take what is left over."""
    size, rest = divmod(items, parts)
    return [part * size + min(part, rest) for part in range(parts + 1)]


def balanced(weights: Sequence[int], parts: int) -> list[int]:
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
