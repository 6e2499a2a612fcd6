"""Parallel layouts of a number of GPUs, and names for groups of them."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, TypeVar

K = TypeVar("K")
V = TypeVar("V")

Axis = Literal["tp", "dp", "tp pp"]
"""Axes by which layouts are grouped."""

_RECOMPUTED = ("none", "selective", "full")
_MICRO_BATCHES = (1, 2, 4, 8)
_MOST_CHUNKS = 8


@dataclass(frozen=True, order=True, kw_only=True)
class Layout:
    """One parallel layout."""

    tensor: int
    pipeline: int
    data: int
    zero_stage: int
    micro_batch_size: int
    recompute: str  # none, selective or full
    expert: int = 1
    expert_tensor: int = 0  # ranks that share each expert; 0: the tensor-parallel ones
    chunks: int = 1  # virtual stages of a pipeline rank

    def __str__(self) -> str:
        chunks = f" ({self.chunks} chunks each)" if self.chunks > 1 else ""
        return (
            f"tp {self.tensor} pp {self.pipeline}{chunks} dp {self.data}{self.of_experts} | ZeRO {self.zero_stage} | "
            f"micro-batch {self.micro_batch_size} | recompute {self.recompute}"
        )

    @property
    def of_experts(self) -> str:
        """How experts are divided, with a space in front; "" if as other layers are."""
        per_expert = f" etp {self.expert_tensor}" if self.expert_tensor else ""
        return f" ep {self.expert}{per_expert}" if self.expert > 1 else ""

    def flags(self) -> str:
        """Return the flags that ask for it."""
        words = (
            f"--tensor-model-parallel-size {self.tensor} "
            f"--pipeline-model-parallel-size {self.pipeline} --zero-stage {self.zero_stage} "
            f"--micro-batch-size {self.micro_batch_size}"
        )
        if self.tensor > 1:
            words += " --sequence-parallel"
        if self.chunks > 1:
            words += f" --num-virtual-stages-per-pipeline-rank {self.chunks}"
        if self.expert > 1:
            words += f" --moe-expert-parallel-size {self.expert}"
        if self.expert_tensor:
            words += f" --expert-tensor-parallel-size {self.expert_tensor}"
        if self.recompute == "selective":
            words += " --recompute-activations"
        return words + (" --checkpoint-activations" if self.recompute == "full" else "")


def layouts_of(num_gpus: int, num_layers: int, num_experts: int = 1) -> Iterator[Layout]:
    """Yield every layout of `num_gpus` devices that a search looks at.

    Args:
        num_experts: what an expert-parallel size divides.
    """
    for tensor in (1, 2, 4, 8, 16):
        if num_gpus % tensor:
            continue
        for pipeline in range(1, min(num_layers, num_gpus // tensor) + 1):
            if num_gpus // tensor % pipeline:
                continue
            data = num_gpus // tensor // pipeline
            stages = (1,) if pipeline > 1 else (1, 2, 3)
            for zero_stage, micro, recompute in product(stages, _MICRO_BATCHES, _RECOMPUTED):
                # ZeRO stage 3 divides the weights of experts itself.
                divides = zero_stage < 3
                for expert, expert_tensor in _divisions(
                    num_experts, data, tensor if divides else 0
                ):
                    yield Layout(
                        tensor=tensor,
                        pipeline=pipeline,
                        data=data,
                        zero_stage=zero_stage,
                        micro_batch_size=micro,
                        recompute=recompute,
                        expert=expert,
                        expert_tensor=expert_tensor,
                    )


def in_chunks(layout: Layout, num_layers: int) -> Iterator[Layout]:
    """Yield `layout` with several chunks of equally many layers on each pipeline rank."""
    per_stage, rest = divmod(num_layers, layout.pipeline)
    if layout.pipeline > 1 and not rest:
        counts = range(2, min(per_stage, _MOST_CHUNKS) + 1)
        yield from (replace(layout, chunks=n) for n in counts if per_stage % n == 0)


def _divisions(num_experts: int, data: int, tensor: int) -> Iterator[tuple[int, int]]:
    """Yield expert-parallel sizes, each with the ranks of an expert: 0 for all `tensor` ones, or 1."""
    yield 1, 0
    for ranks, expert_tensor in ((data, 0), (data * tensor, 1)):
        if tensor > expert_tensor:
            shared = math.gcd(num_experts, ranks)
            yield from (
                (size, expert_tensor) for size in range(2, shared + 1) if shared % size == 0
            )


def places(
    some: Iterable[Layout], fitting: Iterable[Layout], known: Sequence[Layout], axis: Axis
) -> Iterator[tuple[str, str]]:
    """Yield what `some` layouts have in common, each value of `axis` once, and what they alone have.

    Args:
        fitting: other layouts; "" is listed besides a value that none of them has.
        known: all layouts of the search.
    """
    gathered = defaultdict[str, list[Layout]](list)
    for layout in some:
        gathered[_along(layout, axis)].append(layout)
    mixed = {_along(layout, axis) for layout in fitting}
    for value, those in gathered.items():
        stages = {layout.zero_stage for layout in known if _along(layout, axis) == value}
        yield value, _apart(those, stages) if value in mixed else ""


def _along(layout: Layout, axis: Axis) -> str:
    sizes = {"tp": layout.tensor, "pp": layout.pipeline, "dp": layout.data}
    words = " ".join(f"{name} {sizes[name]}" for name in axis.split())
    return words + layout.of_experts if "tp pp" in axis else words


def _apart(layouts: Iterable[Layout], stages: set[int]) -> str:
    """Return the ZeRO stages, recomputation and micro-batches of `layouts`, where they are few.

    Args:
        stages: of ZeRO that there could be.
    """
    sizes = defaultdict[int, dict[str, list[int]]](dict)
    for layout in layouts:
        stage_sizes = sizes[layout.zero_stage].setdefault(layout.recompute, [])
        if layout.micro_batch_size not in stage_sizes:
            stage_sizes.append(layout.micro_batch_size)
    by_stage = {
        stage: [
            _join_values("recompute", names, _RECOMPUTED)
            + _join_values("micro-batch", micro, _MICRO_BATCHES)
            for micro, names in _with_same_value({r: tuple(m) for r, m in stage_sizes.items()})
        ]
        for stage, stage_sizes in sizes.items()
    }
    return " or ".join(
        (_join_values("ZeRO", numbers, stages) + words).strip()
        for each, numbers in _with_same_value({s: tuple(texts) for s, texts in by_stage.items()})
        for words in each
    )


def _with_same_value(values: Mapping[K, V]) -> list[tuple[V, list[K]]]:
    """Return each value with its keys."""
    keys = defaultdict[V, list[K]](list)
    for key, value in values.items():
        keys[value].append(key)
    return [*keys.items()]


def _join_values(name: str, some: Sequence[object], everything: Iterable[object]) -> str:
    """Return `name` and its values; nothing when there are no others."""
    return "" if set(some) == set(everything) else f"{name} {'/'.join(map(str, some))} "
