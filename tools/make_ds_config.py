#!/usr/bin/env python
"""Print the JSON that DeepSpeed is given for the flags of pretrain_gpt.py.

A file in --deepspeed_config is merged as in training: what contradicts the flags is refused.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.config.config import parse_config_for_checkpoint
from megatron.config.plan.plan import plan
from megatron.config.plan.samples import fewest_processes, with_some_data

NOT_NEEDED = {"schedule": {"lr": 1e-4}}
"""Values for flags of training that the JSON does not depend on."""

VOCABULARY = 50257
"""Placeholder vocabulary size: the JSON does not depend on it either."""


def main(argv: Sequence[str]) -> None:
    """Print the JSON; notices go to stderr.

    Raises:
        ConfigError: lists every problem.
    """
    config, _ = parse_config_for_checkpoint(argv, NOT_NEEDED, {}, description=__doc__ or "")
    objective = config.plugins.objective or "gpt"
    decided = plan(
        with_some_data(config, objective),
        world_size=config.parallel.world_size or fewest_processes(config),
        vocab_size=VOCABULARY,
        device="cpu" if config.parallel.device == "cpu" else "cuda",
        objective=objective,
    )
    for notice in decided.notices:
        print(notice, file=sys.stderr)
    print(json.dumps(decided.deepspeed, indent=2))


if __name__ == "__main__":
    run_tool(main)
