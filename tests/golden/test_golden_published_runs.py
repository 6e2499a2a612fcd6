"""Estimated times of steps beside published ones: the table of docs/performance.md."""

from pathlib import Path

from golden_files import require_golden
from published_runs import RUNS

from megatron.config.config import parse_config
from megatron.config.plan.plan import plan
from megatron.planner.calibration import ROOFLINE
from megatron.planner.speed import speed_of

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
TOLERANCE = 0.12
MISSED = {"MPT 1B", "Llama 3.1 8B, ZeRO 3", "Llama 3.1 8B, ZeRO 3, TP 8"}
"""Runs outside of it; the page gives the reasons."""


def estimated(run):
    """Return the published time of a step, in seconds, and the estimate."""
    common = "--lr 1e-4 --data-path none --train-iters 1"
    config, _ = parse_config(f"{common} {run.flags}".split())
    decided = plan(config, world_size=run.num_gpus, vocab_size=run.vocab_size, device="cuda")
    speed = speed_of(decided, run.device)
    tokens = decided.batch.global_batch_size * decided.model.seq_length
    return run.step_s(tokens=tokens, flops=speed.hardware_flops), speed


def test_estimates_of_published_runs():
    lines = [
        "| run | source | GPUs | step, published (s) | estimated (s) | error | "
        "MFU, published | estimated | estimated, causal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    missed, ratios = set(), []
    for run in RUNS:
        published, speed = estimated(run)
        ratios.append(published / speed.step_s)
        error = 1 / ratios[-1] - 1
        if abs(error) > TOLERANCE:
            missed.add(run.name)
        lines.append(
            f"| {run.name} | {run.source} | {run.num_gpus} {run.device.name} | {published:.2f} | "
            f"{speed.step_s:.2f} | {error:+.1%} | {speed.mfu / ratios[-1]:.1%} | {speed.mfu:.1%} | "
            f"{speed.causal_mfu:.1%} |"
        )
    table = "\n".join(lines) + "\n"
    require_golden("published_runs.md", table)
    assert table in PAGE.read_text(encoding="utf-8")
    assert missed == MISSED
    # The band of estimates that nothing calibrates.
    shortest, longest = ROOFLINE.span
    assert shortest <= min(ratios) and max(ratios) <= longest
