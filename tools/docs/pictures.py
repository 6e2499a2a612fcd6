#!/usr/bin/env python
"""Draw the pictures of the pages from this program's code, and a real run's loss."""

import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.checkpointing.manifest import ASIDE, KEEP, LATEST, MANIFEST, PRUNED, STAGING, tag_of
from megatron.common.cli import ToolParser, run_tool
from megatron.common.version import VERSION
from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.data.sampling.sample_index import build_sample_index, plan_epochs
from megatron.planner.memory import memory_of_stages
from megatron.tensor_parallel.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
COLORS = ("#4a90d9", "#55a84b", "#e0a030", "#b05fb8", "#d9534f", "#7f8c8d")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "pictures", "font.size": 9}

GRID = Topology(pipeline=2, data=2, tensor=2)
ZERO_RUN = (
    "--preset llama-3-8b --bf16 --micro-batch-size 1 --global-batch-size 16 --train-iters 1 --lr 1 "
    "--data-path none --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
ZERO_RANKS = 16
QUICKSTART = Path(__file__).with_name("quickstart_loss.tsv")
"""Losses of `bash examples/quickstart.sh`, from its journal: kind, iteration, nats per token."""

LENGTHS, SEQ_LENGTH = (7, 3, 6, 5), 4
"""Tokens of each document, and of a sample."""


def main(argv: Sequence[str]) -> None:
    """Write the pictures."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the SVG files")
    args = parser.parse_args(argv)
    matplotlib.rcParams.update(STYLE)
    for draw in (rank_grid, zero_stages, samples, quickstart_loss, checkpoint_life):
        figure = draw()
        figure.savefig(
            args.output / f"{draw.__name__}.svg",
            metadata={"Date": None},
            bbox_inches="tight",
            facecolor="white",
        )
    for name, text in badges().items():
        (args.output / name).write_text(text, encoding="utf-8")


def badge(name: str, value: str) -> str:
    """Return an SVG of two words side by side."""
    left, right = 7 * len(name) + 12, 7 * len(value) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" '
        f'role="img" aria-label="{name}: {value}" font-family="Verdana,sans-serif" font-size="11" '
        f'fill="#fff" text-anchor="middle"><rect width="{left}" height="20" fill="#555"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="#2f6fad"/>'
        f'<text x="{left / 2:g}" y="14">{name}</text>'
        f'<text x="{left + right / 2:g}" y="14">{value}</text></svg>\n'
    )


def badges() -> dict[str, str]:
    """Return the badges of the README by file name: what pyproject.toml and the version say."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"Python :: (3\.\d+)", project)
    (licence,) = re.findall(r'^license = "(.*)"$', project, re.MULTILINE)
    shown = {
        "version": VERSION,
        "python": f"{versions[0]} to {versions[-1]}",
        "licence": licence,
    }
    return {f"badge_{name}.svg": badge(name, value) for name, value in shown.items()}


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
            memory = _undivided_bytes(decided.model.num_parameters)
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


def _undivided_bytes(parameters: int) -> dict[str, int]:
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


def quickstart_loss() -> Figure:
    """Draw the losses of the quickstart's run."""
    figure = Figure(figsize=(6.2, 2.6))
    axes = figure.add_subplot()
    with QUICKSTART.open(encoding="utf-8", newline="") as file:
        rows = [
            (kind, int(step), float(loss)) for kind, step, loss in csv.reader(file, "excel-tab")
        ]
    for kind, style, color in zip(("training", "validation"), ("-", "o"), COLORS, strict=False):
        points = [(step, loss) for found, step, loss in rows if found == kind]
        axes.plot(*zip(*points, strict=True), style, color=color, label=kind)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure


def checkpoint_life() -> Figure:
    """Draw the folders that a checkpoint is in, from its first byte to its removal."""
    figure, axes = _empty(8.2, 1.9)
    tag = tag_of(5)
    steps = (
        (f"{STAGING}{tag}", "ranks write their files,\nhash and flush them"),
        (f"{STAGING}{tag}/\n{MANIFEST}", "written last: size and\nhash of every file"),
        (tag, f"one rename publishes it;\nthen {LATEST} names it"),
        (f"{PRUNED}{tag}", f"--keep-last lets it go, unless\na file {KEEP} is in it"),
    )
    for number, (name, words) in enumerate(steps):
        x = 2.3 * number
        color = COLORS[1] if name == tag else COLORS[5]
        axes.add_patch(matplotlib.patches.Rectangle((x, 0), 1.9, 0.8, facecolor=color))
        axes.text(x + 0.95, 0.4, name, ha="center", va="center", color="white", fontsize=8)
        axes.text(x + 0.95, -0.12, words, ha="center", va="top", color="#333333", fontsize=8)
        if number:
            axes.annotate("", (x - 0.03, 0.4), (x - 0.37, 0.4), arrowprops={"arrowstyle": "->"})
    for x, words in (
        (0.0, "a crash leaves it; the next start removes it"),
        (4.6, f"a load compares every hash; {ASIDE}{tag} if the run goes back"),
    ):
        axes.text(x, 0.95, words, color="#333333", fontsize=8)
    axes.set_xlim(-0.1, 9.2)
    axes.set_ylim(-0.75, 1.25)
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
