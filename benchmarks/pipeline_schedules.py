#!/usr/bin/env python
"""Timelines and idle shares of pipeline schedules, 1F1B, interleaved and zero bubble, from a simulation.

A forward pass takes one unit of time on a full stage, a backward pass two, of which a zero-bubble
schedule computes the weight gradients in one, and messages none. Prints a table of
docs/parallelism.md; --output writes its picture.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import ToolParser, run_tool
from megatron.pipeline.schedule import (
    Direction,
    Grid,
    Times,
    idle_share,
    simulated_times,
    step_time,
)

SIZES = ((2, 8, (1, 2, 4)), (4, 8, (1, 2, 4)), (8, 32, (1, 2, 4)))
"""Stages, micro-batches, and numbers of chunks."""

DRAWN = (
    Grid(ranks=4, chunks=1, micro_batches=8),
    Grid(ranks=4, chunks=2, micro_batches=8),
    Grid(ranks=4, chunks=1, micro_batches=8, splits_backward=True),
)
UNIT, ROW, LEFT, GAP = 22, 22, 62, 34
"""Pixels of a unit of time, of a rank, in front of the ranks, and between timelines."""

FILLS = {
    "forward": ("#9ecbff", "#4a90d9"),
    "backward": ("#b7e4b0", "#55a84b"),
    "weight": ("#ffd9a0", "#e6a23c"),
}
"""Colors of the passes, by chunk."""


def main(argv: Sequence[str]) -> None:
    """Print the table, and write the picture if a file is given."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="SVG file of the timelines")
    args = parser.parse_args(argv)
    print("\n".join(table_lines()))
    if args.output:
        args.output.write_text(picture(), encoding="utf-8")


def table_lines() -> Iterator[str]:
    """Yield the table of idle shares, in Markdown."""
    yield "| stages | micro-batches | chunks | idle | zero bubble | activations of stage 0 |"
    yield "|---|---|---|---|---|---|"
    for ranks, micro_batches, all_chunks in SIZES:
        for chunks in all_chunks:
            grids = [
                Grid(
                    ranks=ranks, chunks=chunks, micro_batches=micro_batches, splits_backward=splits
                )
                for splits in (False, True)
            ]
            idle = " | ".join(map(_idle, grids))
            held = sum(grids[0].most_in_flight(0)) / chunks
            yield f"| {ranks} | {micro_batches} | {chunks} | {idle} | {held:g} micro-batches |"


def cost_of(grid: Grid) -> dict[Direction, float]:
    """Return the time of each pass of a full stage."""
    if grid.splits_backward:
        return {"forward": 1.0, "backward": 1.0, "weight": 1.0}
    return {"forward": 1.0, "backward": 2.0}


def _idle(grid: Grid) -> str:
    times = simulated_times(grid, cost=cost_of(grid))
    return f"{idle_share(times):.1%}, step {step_time(times):g}"


def picture() -> str:
    """Return the timelines of DRAWN as SVG."""
    drawn = [(grid, simulated_times(grid, cost=cost_of(grid))) for grid in DRAWN]
    width = LEFT + UNIT * max(step_time(times) for _, times in drawn) + 8
    parts, top = [], 20
    for grid, times in drawn:
        parts += _timeline(grid, times, top)
        top += ROW * grid.ranks + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{top - GAP + 8}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{"".join(parts)}</svg>\n'
    )


def _timeline(grid: Grid, times: Sequence[Times], top: int) -> Iterator[str]:
    name = "1F1B" if grid.chunks == 1 else f"interleaved, {grid.chunks} chunks a stage"
    if grid.splits_backward:
        name = "zero bubble"
    yield (
        f'<text x="4" y="{top - 6}">{name}: {step_time(times):g} units, '
        f"{idle_share(times):.0%} idle</text>\n"
    )
    for rank, passes in enumerate(times):
        y = top + ROW * rank
        yield f'<text x="4" y="{y + 15}">stage {rank}</text>\n'
        for each, (start, end) in passes.items():
            x, width = LEFT + UNIT * start, UNIT * (end - start)
            fill = FILLS[each.direction][each.chunk % 2]
            yield (
                f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{ROW - 2}" fill="{fill}" '
                f'stroke="white"/><text x="{x + width / 2:g}" y="{y + 15}" font-size="9" '
                f'text-anchor="middle">{each.micro_batch}</text>\n'
            )


if __name__ == "__main__":
    run_tool(main)
