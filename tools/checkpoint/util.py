#!/usr/bin/env python
"""Convert a checkpoint from one system to another.

Reads checkpoints of Megatron-LM, of BigScience's and Microsoft's Megatron-DeepSpeed, Meta's Llama
files and our own; writes our own and Megatron-LM's. Flags of training add to what the files contain
and override it.
"""

import os.path
import sys

# This folder last: its inspect.py is not the inspect of the standard library.
sys.path.sort(key=lambda p: os.path.realpath(p) == os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.realpath(__file__).rsplit("/", 3)[0])  # so that it runs from anywhere

from collections.abc import Sequence
from functools import partial

from megatron.common.cli import run_tool
from megatron.config.config import parse_conversion
from megatron.config.foreign_flags.run import CONVERSION_LEGACY
from megatron.config.run.urls import cache_of
from megatron.config.tools.checkpoint_tools import ConversionConfig, architectures


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    parse = partial(
        parse_conversion,
        argv=argv,
        section=ConversionConfig,
        legacy=CONVERSION_LEGACY,
        description=__doc__,
    )
    parsed = parse({})
    section: ConversionConfig = parsed.own
    for notice in parsed.notices:
        print(notice)
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.megatron_lm.convert import Conversion, convert
    from megatron.checkpointing.remote import local_checkpoint, local_folder

    cache = cache_of(parsed.config.urls)
    source = local_checkpoint(section.load_dir, cache, flag="--load-dir", foreign=True)
    with local_folder(section.save_dir, cache, flag="--save-dir") as output:
        conversion = Conversion(
            source=source,
            output=output,
            loader=section.loader,
            saver=section.saver,
            tensor=section.target_tensor_parallel_size or 1,
            pipeline=section.target_pipeline_parallel_size or 1,
            flags=("--target-tensor-parallel-size", "--target-pipeline-parallel-size"),
            heads=parsed.config.model.num_attention_heads or None,
            distributed=section.ckpt_format == "torch_dist",
            architecture=architectures()[section.model_type],
        )
        for line in convert(conversion, lambda found: parse(found).config):
            print(line)


if __name__ == "__main__":
    run_tool(main)
