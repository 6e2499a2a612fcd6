#!/usr/bin/env python
"""Reshard a Megatron-LM checkpoint: merge or split tensor and pipeline ranks; default: one rank.

Flags of training add what the files do not contain. The world size and the layout are read from the
files; --tensor-model-parallel-size, if given, must equal theirs.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import options_given, parse_conversion
from megatron.config.run.urls import cache_of
from megatron.config.tools.checkpoint_tools import PartitionsConfig, architectures


def main(argv: Sequence[str]) -> None:
    """Convert by the command line `argv`."""
    parse = partial(parse_conversion, argv=argv, section=PartitionsConfig, description=__doc__)
    parsed = parse({})
    section: PartitionsConfig = parsed.own
    folders = parsed.config.checkpoint
    for notice in parsed.notices:
        print(notice)
    if section.model_type not in architectures():
        raise ConfigError(
            f"--model-type {section.model_type}: only {', '.join(architectures())} are merged"
        )
    if not folders.load:
        raise ConfigError("--load is missing: the directory of the checkpoint")
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.megatron_lm.convert import Conversion, convert
    from megatron.checkpointing.megatron_lm.megatron import tensor_ranks
    from megatron.checkpointing.remote import local_checkpoint, local_folder

    cache = cache_of(parsed.config.urls)
    source = local_checkpoint(folders.load, cache, foreign=True)
    ranks = tensor_ranks(source)
    size = options_given(argv).get("tensor_model_parallel_size")
    if size is not None and int(size) != ranks:
        raise ConfigError(
            f"--tensor-model-parallel-size {size}, but the files in {folders.load} are of {ranks} "
            "tensor-parallel ranks; --target-tensor-model-parallel-size sets the ranks to write for"
        )
    with local_folder(folders.save or f"{folders.load}/merged", cache) as output:
        conversion = Conversion(
            source=source,
            output=output,
            loader="megatron",
            saver="megatron",
            tensor=section.target_tensor_model_parallel_size,
            pipeline=section.target_pipeline_model_parallel_size,
            flags=(
                "--target-tensor-model-parallel-size",
                "--target-pipeline-model-parallel-size",
            ),
            heads=parsed.config.model.num_attention_heads or None,
            architecture=architectures()[section.model_type],
        )
        for line in convert(conversion, lambda found: parse(found).config):
            print(line)


if __name__ == "__main__":
    run_tool(main)
