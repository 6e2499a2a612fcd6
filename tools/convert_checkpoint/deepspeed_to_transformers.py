#!/usr/bin/env python
"""Write a checkpoint as a model of transformers; to_hf.py, asked in the words of older scripts."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.names import checkpoint_of
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.config.config import parse_config_for_checkpoint
from megatron.config.data.tokenizer import gpt_tokenizer_arguments
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.hugging_face import TransformersConfig
from megatron.tokenizer.build import build_tokenizer


def main(argv: Sequence[str]) -> None:
    """Do what the command line `argv` asks for."""
    said = parse_sections(
        argv, {"transformers": TransformersConfig}, description=__doc__ or ""
    ).sections
    config: TransformersConfig = said["transformers"]
    for flag, ranks in (("--target_tp", config.target_tp), ("--target_pp", config.target_pp)):
        if ranks != 1:
            raise ConfigError(
                f"{flag} {ranks}: files of transformers are not divided over ranks; leave it out"
            )
    source = checkpoint_of(Path(config.input_folder))
    manifest = read_manifest(source)
    saved, _ = parse_config_for_checkpoint([], manifest.config, {})
    wishes = gpt_tokenizer_arguments(saved.tokenizer)
    tokenizer = build_tokenizer(**wishes)
    # Not above: torch is slow to import, and a wrong flag should not wait for it.
    from megatron.checkpointing.hugging_face.export import ExportOptions, export

    output = Path(config.output_folder)
    own = ExportOptions(for_release=config.for_release)
    exported = export(source, manifest, output, tokenizer, wishes, own)
    print(f"{output} holds {source} as {exported.family.architecture} in {exported.dtype}")


if __name__ == "__main__":
    run_tool(main)
