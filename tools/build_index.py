#!/usr/bin/env python
"""Build the index maps of a training run ahead of time, without torch and without a GPU.

Takes the command line of training, with --objective for another one than GPT's; flags that do not
concern data may be left out.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.config.config import ANY_NETWORK, parse_config_for_checkpoint
from megatron.config.plan.samples import plan_samples
from megatron.data.datasets.datasets import build_datasets
from megatron.training.prepare import with_local_data


def main(argv: Sequence[str]) -> None:
    """Build the index maps of the run with the flags `argv`, then print them."""
    log.configure(rank=0)
    config, _ = parse_config_for_checkpoint(argv, ANY_NETWORK, {}, description=__doc__ or "")
    config = with_local_data(config, config.plugins.objective or "gpt")
    decided = plan_samples(
        config,
        world_size=config.parallel.world_size,
        objective=config.plugins.objective or "gpt",
    )
    started_at = time.monotonic()
    # The order in which samples are taken has no separate map.
    sets = build_datasets(
        replace(decided.data, order="single"),
        seq_length=decided.seq_length,
        seed=decided.training.seed,
    )
    plan = decided.data
    named = [("training", "train", plan.train, sets.train)]
    named += [("validation", "valid", each, sets.valid.get(each.name)) for each in plan.valid]
    named += [("test", "test", each, sets.test.get(each.name)) for each in plan.test]
    for word, role, each, dataset in named:
        there = "none" if dataset is None else len(dataset)
        print(f"{word} set {each.name}: samples wanted: {each.num_samples} | samples: {there}")
        for use in sets.uses.get((role, each.name), ()):
            print(
                f"  {use.prefix}: weight: {use.share:.4f} | documents: {use.documents} | tokens: "
                f"{use.tokens} | samples wanted: {use.samples_wanted} | epochs: {use.epochs:.2f}"
            )
    print(
        f"sequence length: {decided.seq_length} | seed: {decided.training.seed} | global batch "
        f"size: {decided.batch.global_batch_size} | {time.monotonic() - started_at:.1f} s"
    )


if __name__ == "__main__":
    run_tool(main)
