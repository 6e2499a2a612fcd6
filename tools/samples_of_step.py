#!/usr/bin/env python
"""Print the samples, and the parts of documents, that a training step sees.

For a run that has saved checkpoints, --load is enough: all other flags default to the run's.
Without it, give the command line of pretrain_gpt.py; flags unrelated to data may be left out.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.checkpointing.saved_run import read_saved_run
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import options_given, parse_config_for_checkpoint
from megatron.config.plan.samples import plan_samples
from megatron.config.tools.data_tools import StepSamplesConfig
from megatron.data.datasets.datasets import build_datasets
from megatron.data.sampling.provenance import describe, reader
from megatron.training.prepare import with_local_data


def main(argv: Sequence[str]) -> None:
    """Print one line for each sample of the steps in `argv`."""
    run = read_saved_run(options_given(argv).get("load"))
    config, sections = parse_config_for_checkpoint(
        argv,
        run.config,
        {"steps": StepSamplesConfig},
        description=__doc__ or "",
    )
    config = with_local_data(config, config.plugins.objective or run.objective)
    options: StepSamplesConfig = sections["steps"]
    resolved = plan_samples(
        config,
        world_size=config.parallel.world_size or run.world_size,
        objective=config.plugins.objective or run.objective,
    )
    first, last = step_range(options.steps, resolved.training.train_iters)
    plan = replace(resolved.data, valid=(), test=())
    train = build_datasets(plan, seq_length=resolved.seq_length, seed=resolved.training.seed).train
    for step in range(first, last + 1):
        start, stop = (resolved.batch.samples_before(count) for count in (step - 1, step))
        print(f"step {step}: samples {start} to {stop - 1}")
        for i in range(start, stop):
            print(
                f"  sample {i} | {reader(resolved.batch, i - start)} | {describe(train.origin(i))}"
            )


def step_range(steps: Sequence[int], train_iters: int) -> tuple[int, int]:
    """Return the first and the last of `steps`, which are one or two numbers."""
    words = " ".join(map(str, steps))
    if len(steps) > 2:
        raise ConfigError(f"--steps {words}: give one number, or the first and the last")
    if steps[0] > steps[-1]:
        raise ConfigError(f"--steps {words}: give the first step, then the last")
    if not 1 <= steps[0] <= steps[-1] <= train_iters:
        raise ConfigError(f"--steps {words}: the run has steps 1 to {train_iters}")
    return steps[0], steps[-1]


if __name__ == "__main__":
    run_tool(main)
