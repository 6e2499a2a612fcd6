#!/usr/bin/env python
"""Upcycle a dense checkpoint: write it with experts that compute the same function.

The flags of experts are those of training. Weights of the chosen experts must have a sum of 1: --topk
of 2 or more, without --moe-router-pre-softmax.
"""

import os.path
import sys

# This folder last: its inspect.py is not the inspect of the standard library.
sys.path.sort(key=lambda p: os.path.realpath(p) == os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.realpath(__file__).rsplit("/", 3)[0])  # so that it runs from anywhere

import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.remote import local_checkpoint, local_directory, upload_checkpoints
from megatron.common.cli import run_tool
from megatron.config.network.experts import ExpertConfig
from megatron.config.parsing.flags import parse_sections
from megatron.config.run.urls import UrlConfig, cache_of
from megatron.config.tools.checkpoint_tools import UpcycleConfig


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    sections = {"upcycle": UpcycleConfig, "experts": ExpertConfig, "urls": UrlConfig}
    parsed = parse_sections(argv, sections, description=__doc__ or "").sections
    config: UpcycleConfig = parsed["upcycle"]
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.conversion.upcycle import upcycle

    cache = cache_of(parsed["urls"])
    save = Path(local_directory(config.save, cache, flag="--save"))
    source = local_checkpoint(config.load, cache)
    folder = upcycle(source, save, parsed["experts"], config.moe_upcycling_granularity)
    upload_checkpoints(save)
    print(f"{folder} holds {config.load} with experts; train it with")
    print(shlex.join(["--load", config.save, "--use-checkpoint-args", "--finetune"]))


if __name__ == "__main__":
    run_tool(main)
