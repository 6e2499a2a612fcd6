#!/usr/bin/env python
"""Print a layout-independent hash of a checkpoint: `digest.py PATH`.

Two checkpoints with the same digest hold the same weights, optimizer states and counts of steps.
"""

import os.path
import sys

# This folder last: its inspect.py is not the inspect of the standard library.
sys.path.sort(key=lambda p: os.path.realpath(p) == os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.realpath(__file__).rsplit("/", 3)[0])  # so that it runs from anywhere

from collections.abc import Sequence

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.checkpointing.remote import local_checkpoint
from megatron.common.cli import run_tool, with_flag
from megatron.config.parsing.flags import parse_sections
from megatron.config.run.urls import UrlConfig, cache_of
from megatron.config.tools.checkpoint_tools import LookConfig


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    argv = with_flag(argv, "--path", "the path of a checkpoint")
    parsed = parse_sections(
        argv, {"look": LookConfig, "urls": UrlConfig}, description=__doc__ or ""
    ).sections
    config: LookConfig = parsed["look"]
    folder = checkpoint_of(local_checkpoint(config.path, cache_of(parsed["urls"]), flag="--path"))
    manifest = read_manifest(folder)
    from megatron.checkpointing.resharding.digest import digest_of, digests
    from megatron.checkpointing.resharding.universal import read_checkpoint

    checkpoint = read_checkpoint(folder, manifest)
    named = list(digests(checkpoint, manifest.spec.vocabulary.vocab_size))
    if config.parameters:
        for name, digest in named:
            print(f"{digest} {name}")
    print(f"{digest_of(named)} {folder} at iteration {manifest.state.iteration}")


if __name__ == "__main__":
    run_tool(main)
