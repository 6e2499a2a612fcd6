#!/usr/bin/env python
"""Draw the pictures of the pages with this program's own code: rank grid, ZeRO stages, samples."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.common.cli import ToolParser, run_tool
from megatron.config.config import parse_config
from megatron.config.plan import plan
from megatron.data.sampling.sample_index import build_sample_index, plan_epochs
from megatron.planner.memory import memory_of_stages
from megatron.tensor_parallel.topology import Topology

COLORS = ("#4a90d9", "#55a84b", "#e0a030", "#b05fb8", "#d9534f", "#7f8c8d")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pictures", "font.size": 9}

GRID = Topology(pipeline=2, data=2, tensor=2)
ZERO_RUN = (
    "--preset llama-3-8b --bf16 --micro-batch-size 1 --global-batch-size 16 --train-iters 1 --lr 1 "
    "--data-path none --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
ZERO_RANKS = 16
LENGTHS, SEQ_LENGTH = (7, 3, 6, 5), 4
"""Tokens of each document, and of a sample."""


def main(argv: Sequence[str]) -> None:
    """Write the pictures."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the SVG files")
    args = parser.parse_args(argv)
    matplotlib.rcParams.update(STYLE)
    for draw in (rank_grid, zero_stages, samples):
        figure = draw()
        figure.savefig(
            args.output / f"{draw.__name__}.svg",
            metadata={"Date": None},
            bbox_inches="tight",
            facecolor="white",
        )


def rank_grid() -> Figure:
    """Draw a grid of tensor, pipeline and data parallelism, one box for each rank."""
    figure, axes = _empty(6.2, 2.9)
    for rank in range(GRID.pipeline * GRID.data * GRID.tensor):
        stage, replica, shard = (
            GRID.stage_of(rank),
            GRID.data_rank_of(rank),
            GRID.tensor_rank_of(rank),
        )
        x, y = replica * (GRID.tensor + 0.5) + shard, -stage
        _box(axes, x, y, f"rank {rank}", COLORS[stage * GRID.tensor + shard])
        if not stage:
            axes.text(x + 0.46, 1.05, f"tensor rank {shard}", ha="center", color="#333333")
        if not stage and not shard:
            axes.text(x + 0.96, 1.4, f"replica {replica}", ha="center", weight="bold")
        if not replica and not shard:
            axes.text(-0.1, y + 0.42, f"stage {stage}", ha="right", weight="bold")
    for number, (name, groups) in enumerate(
        {
            "tensor groups (halves of a layer)": GRID.tensor_groups(),
            "data groups (equal weights, here of one color)": GRID.data_groups(),
        }.items()
    ):
        axes.text(-0.6, -1.5 - 0.35 * number, f"{name}: {groups}", color="#333333")
    axes.set_xlim(-0.9, 4.6)
    axes.set_ylim(-2.0, 1.7)
    return figure


def zero_stages() -> Figure:
    """Draw what each ZeRO stage leaves on a rank: the planner's estimate for a Llama 3 8B."""
    figure, axes = _empty(6.2, 2.6)
    axes.axis("on")
    parts = ("weights", "gradients", "optimizer")
    for stage in range(4):
        config, _ = parse_config([*ZERO_RUN.split(), "--zero-stage", str(stage)])
        decided = plan(config, world_size=ZERO_RANKS, vocab_size=128_256, device="cuda")
        if decided.parallel.zero_stage != stage:  # 16 bits at stage 0 divide the optimizer too
            memory = _undivided(decided.model.num_parameters)
        else:
            (estimate,) = memory_of_stages(decided)
            memory = {part: getattr(estimate, part) for part in parts}
        left = 0.0
        for part, color in zip(parts, COLORS, strict=False):
            width = memory[part] / 2**30
            axes.barh(-stage, width, left=left, color=color, label=None if stage else part)
            left += width
        axes.text(left + 1, -stage, f"{left:.0f} GiB", va="center")
    axes.set_yticks([0, -1, -2, -3], [f"ZeRO {stage}" for stage in range(4)])
    axes.set_xlabel(
        f"GiB on each of {ZERO_RANKS} replicas, Llama 3 of 8 billion parameters in bf16"
    )
    axes.set_xlim(0, 140)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def _undivided(parameters: int) -> dict[str, int]:
    """Return the bytes of 16-bit weights, 32-bit gradients, and three 32-bit numbers of Adam."""
    return {"weights": 2 * parameters, "gradients": 4 * parameters, "optimizer": 12 * parameters}


def samples() -> Figure:
    """Draw how documents are packed: shuffled, joined, cut into samples that share a token."""
    figure, axes = _empty(6.2, 2.9)
    sizes = np.array(LENGTHS, np.int32)
    epochs = plan_epochs(sum(LENGTHS), num_samples=5, seq_length=SEQ_LENGTH)
    index = build_sample_index(sizes, range(len(LENGTHS)), epochs, seq_length=SEQ_LENGTH, seed=3)
    order = [int(document) for document in index.document_order]
    axes.text(-0.2, 2.15, "documents", ha="right", weight="bold")
    _row(axes, 2, [(each, token) for each in range(len(LENGTHS)) for token in range(LENGTHS[each])])
    axes.text(-0.2, 1.15, "in the order\nof an epoch", ha="right", va="center", weight="bold")
    stream = [(each, token) for each in order for token in range(LENGTHS[each])]
    _row(axes, 1, stream)
    starts = np.cumsum([0, *(LENGTHS[each] for each in order)])
    for number, (entry, offset) in enumerate(index.sample_starts[: epochs.num_samples]):
        start = int(starts[entry]) + int(offset)
        y = 0.25 - 0.5 * (number % 2)
        axes.plot([start, start + SEQ_LENGTH + 1], [y, y], color="#333333", lw=3)
        drawn = int(np.flatnonzero(index.sample_order == number)[0])
        axes.text(start + (SEQ_LENGTH + 1) / 2, y - 0.28, f"drawn {drawn + 1}.", ha="center")
    axes.text(
        -0.2, 0.1, f"samples of\n{SEQ_LENGTH} + 1 tokens", ha="right", va="center", weight="bold"
    )
    axes.set_xlim(-4.5, sum(LENGTHS) + 0.5)
    axes.set_ylim(-0.7, 2.9)
    return figure


def _row(axes: Axes, y: float, tokens: Sequence[tuple[int, int]]) -> None:
    """Draw tokens side by side; the last of a document is EOD."""
    for x, (document, token) in enumerate(tokens):
        is_last = token == LENGTHS[document] - 1
        _box(axes, x, y, "EOD" if is_last else str(token), COLORS[document], height=0.6, size=6)


def _box(
    axes: Axes, x: float, y: float, text: str, color: str, *, height: float = 0.92, size: int = 9
) -> None:
    axes.add_patch(
        matplotlib.patches.Rectangle((x, y), 0.92, height, facecolor=color, edgecolor="none")
    )
    options: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": size}
    axes.text(x + 0.46, y + height / 2, text, **options)


def _empty(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    axes = figure.add_subplot()
    axes.axis("off")
    return figure, axes


if __name__ == "__main__":
    run_tool(main)
