#!/usr/bin/env python
"""Summarize a run, from the journal next to its checkpoints."""

import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.training.loop.journal import read_journal

Curve = Sequence[tuple[int, float]]
"""Pairs of iteration and loss."""


def main() -> None:
    """Print the summary and write the loss curve to --plot."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=Path, required=True, help="the --save of the run")
    parser.add_argument("--tensorboard", type=Path, required=True, help="its --tensorboard-dir")
    parser.add_argument("--sample", type=Path, required=True, help="a file with generated text")
    parser.add_argument("--plot", type=Path, required=True, help="the PNG file to write")
    args = parser.parse_args()

    records = list(read_journal(args.checkpoints))
    steps = [record for record in records if record["event"] == "train"]
    held_out = [
        record for record in records if record["event"] == "evaluation" and record["set"] == "valid"
    ]
    if not steps:
        sys.exit(
            f"error: {args.checkpoints}: no training step is logged; train for more iterations"
        )
    losses, held_out_losses = curve(steps), curve(held_out)
    write_plot(args.plot, losses, held_out_losses)

    print(terminal_plot(losses))
    print()
    print(f"tokens:                {steps[-1]['consumed_tokens']:,}")
    print(f"loss, first -> last:   {losses[0][1]:.3f} -> {losses[-1][1]:.3f}")
    if held_out:
        print(f"validation perplexity: {held_out[-1]['ppl']:.1f}")
    print(f"checkpoints:           {args.checkpoints}")
    print(f"TensorBoard:           {args.tensorboard} (tensorboard --logdir {args.tensorboard})")
    print(f"loss curve:            {args.plot}")
    print(f"sample:                {args.sample}")
    print()
    print(args.sample.read_text(encoding="utf-8").strip())


def curve(records: Iterable[Mapping[str, Any]]) -> Curve:
    """Return the loss of each record."""
    return [(record["iteration"], record["lm_loss"]) for record in records]


def write_plot(file: Path, losses: Curve, held_out: Curve) -> None:
    """Draw the curves into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot(*zip(*losses, strict=True), label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o", label="validation")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def terminal_plot(losses: Curve, *, width: int = 64, height: int = 10) -> str:
    """Return the curve in letters, the highest loss in the first line."""
    first, last = losses[0][0], losses[-1][0]
    lowest = min(loss for _, loss in losses)
    highest = max(loss for _, loss in losses)
    grid = [[" "] * width for _ in range(height)]
    for iteration, loss in losses:
        column = round((width - 1) * (iteration - first) / max(1, last - first))
        row = round((height - 1) * (highest - loss) / max(1e-9, highest - lowest))
        grid[row][column] = "*"
    labels = [f"{highest:.2f}", *[""] * (height - 2), f"{lowest:.2f}"]
    lines = [f"{label:>6} |{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    axis = f"{'':>6} +{'-' * width}"
    return "\n".join([*lines, axis, f"{'':>8}{first:<{width // 2}}{last:>{width // 2}} iterations"])


if __name__ == "__main__":
    main()
