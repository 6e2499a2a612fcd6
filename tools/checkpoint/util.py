#!/usr/bin/env python
"""Write the checkpoint of one system as that of another.

Read are Megatron-LM's, those of BigScience's and Microsoft's Megatron-DeepSpeed, Meta's files of
Llama, and our own; written are our own and Megatron-LM's. Flags of training say what the files do
not, and win over what they do.
"""

import os.path
import sys

# This folder last: its inspect.py is not the inspect of the standard library.
sys.path.sort(key=lambda p: os.path.realpath(p) == os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.realpath(__file__).rsplit("/", 3)[0])  # so that it runs from anywhere

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import parse_conversion
from megatron.config.foreign_flags.run import CONVERSION_LEGACY
from megatron.config.tools.checkpoint_tools import ConversionConfig


def main(argv: Sequence[str]) -> None:
    """Do what the command line `argv` asks for."""
    parse = partial(
        parse_conversion,
        argv=argv,
        own=ConversionConfig,
        legacy=CONVERSION_LEGACY,
        description=__doc__,
    )
    asked = parse(())
    own: ConversionConfig = asked.own
    for notice in asked.notices:
        print(notice)
    if own.model_type != "GPT":
        raise ConfigError(f"--model-type {own.model_type}: only GPT is converted")
    # Not above: torch is slow to import, and a wrong flag should not wait for it.
    from megatron.checkpointing.megatron_lm.convert import Conversion, convert

    wish = Conversion(
        source=Path(own.load_dir),
        output=Path(own.save_dir),
        loader=own.loader,
        saver=own.saver,
        tensor=own.target_tensor_parallel_size or 1,
        pipeline=own.target_pipeline_parallel_size or 1,
        flags=("--target-tensor-parallel-size", "--target-pipeline-parallel-size"),
        vocab_size=asked.config.tokenizer.true_vocab_size,
        heads=asked.config.model.num_attention_heads or None,
    )
    for line in convert(wish, lambda words: parse(words).config):
        print(line)


if __name__ == "__main__":
    run_tool(main)
