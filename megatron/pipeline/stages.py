"""Layers of each pipeline stage: DeepSpeed's partition, without DeepSpeed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from megatron.config.network.model_spec import ModelSpec
from megatron.config.networks.architecture import Entry, Kind, network_of
from megatron.config.networks.counts import Weights
from megatron.config.parallelism.layout import ParallelPlan

_LAYER = "ParallelTransformerLayerPipe"
_DECODER_LAYER = "ParallelTransformerDecoderLayerPipe"
_ENCODER_NORM = "EncoderNormPipe"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Entries of one pipeline stage, or of a chunk of it."""

    index: int
    entries: tuple[Entry, ...]
    chunks: tuple["Stage", ...] = ()  # its virtual stages; empty with the schedule 1F1B

    @property
    def parts(self) -> tuple["Stage", ...]:
        """Its chunks, or itself if it is one."""
        return self.chunks or (self,)

    @property
    def blocks(self) -> list[Entry]:
        """Its layers; those of a decoder follow the encoder's."""
        return [entry for entry in self.entries if entry.kind == "block"]

    @property
    def layers(self) -> tuple[int, ...]:
        """Their numbers, from 1 on."""
        return tuple(entry.number for entry in self.blocks)

    def has(self, *kinds: Kind) -> bool:
        """Whether there is an entry of one of these kinds."""
        return any(entry.kind in kinds for entry in self.entries)

    @property
    def has_embedding(self) -> bool:
        """Whether tokens come in here."""
        return self.has("embedding")

    @property
    def has_final_norm(self) -> bool:
        """Whether the norm behind the layers is here."""
        return self.has("norm")

    @property
    def has_head(self) -> bool:
        """Whether logits are made here."""
        return self.has("logits", "task")

    @property
    def weights(self) -> Weights:
        """What one rank holds; what is tied inside a stage once."""
        held = {entry.tie or index: entry for index, entry in reversed([*enumerate(self.entries)])}
        return sum((entry.weights for entry in held.values()), Weights())


def stages_of_network(spec: ModelSpec, parallel: ParallelPlan, *, mixed: bool) -> list[Stage]:
    """Return the stages of a network, in order; one without a pipeline.

    Args:
        mixed: whether logits are cast to 32 bits at the end.
    """
    parts, ranks = _virtual_stages(spec, parallel, mixed=mixed), parallel.pipeline
    if parallel.chunks == 1:
        return parts
    return [_joined(rank, tuple(parts[rank::ranks])) for rank in range(ranks)]


def _joined(index: int, chunks: tuple[Stage, ...]) -> Stage:
    entries = tuple(entry for chunk in chunks for entry in chunk.entries)
    return Stage(index=index, entries=entries, chunks=chunks)


def _virtual_stages(spec: ModelSpec, parallel: ParallelPlan, *, mixed: bool) -> list[Stage]:
    """Return the parts that the partition cuts: stages, or chunks of stages."""
    entries = network_of(spec).entries(spec, tensor=parallel.tensor, expert=parallel.expert)
    entries += [Entry(name="to_float32")] * mixed
    bounds = [0, len(entries)]
    if parallel.split_rank:
        names = [entry.name for entry in entries]
        bounds = split_bounds(names, parallel.pipeline, parallel.split_rank)
    elif parallel.pipeline > 1:
        weights = _entry_weights(parallel.partition_method, entries)
        bounds = _partition(tuple(weights), parallel.pipeline * parallel.chunks)
    return [
        Stage(index=index, entries=tuple(entries[start:stop]))
        for index, (start, stop) in enumerate(pairwise(bounds))
    ]


def entry_names(spec: ModelSpec, *, mixed: bool) -> list[str]:
    """Return the names of the entries of the list of layers, as the partition matches them.

    Args:
        mixed: whether logits are cast to 32 bits at the end.
    """
    names = [entry.name for entry in network_of(spec).entries(spec)]
    return [*names, *["to_float32"] * mixed]


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


def _entry_weights(method: str, entries: Sequence[Entry]) -> list[int]:
    if method == "uniform":
        return [1] * len(entries)
    if method.startswith("type:"):
        pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
        return [1 if pattern.search(entry.name) else 0 for entry in entries]
    return [entry.weights.total for entry in entries]


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
