#!/usr/bin/env python
"""Import a Hugging Face transformers model as a checkpoint, on the CPU.

Prints the flags of the script that trains it, such as pretrain_gpt.py.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.remote import local_checkpoint, local_directory, upload_checkpoints
from megatron.common import logging as log
from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.common.installation import in_this_installation
from megatron.config.parsing.flags import parse_sections
from megatron.config.plugins import PluginModulesConfig, load_plugins, modules_in
from megatron.config.run.urls import UrlConfig, cache_of
from megatron.config.tools.hugging_face import ImportConfig


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    log.configure(rank=0)
    load_plugins(modules_in(argv))
    sections = {"import": ImportConfig, "plugins": PluginModulesConfig, "urls": UrlConfig}
    parsed = parse_sections(argv, sections, description=__doc__ or "").sections
    config: ImportConfig = parsed["import"]
    if config.seq_length is not None and config.seq_length < 1:
        raise ConfigError(f"--seq-length {config.seq_length} must be at least 1")
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.hugging_face.import_model import ImportOptions, import_model

    cache = cache_of(parsed["urls"])
    save = Path(local_directory(config.save, cache, flag="--save"))
    imported = import_model(
        local_checkpoint(config.load, cache),
        save,
        ImportOptions(
            tokenizer=config.tokenizer_name_or_path,
            trusts_code=config.trust_remote_code,
            dtype=config.target_dtype,
            seq_length=config.seq_length,
            predicts=config.with_mtp,
            verifies=config.verify,
        ),
    )
    upload_checkpoints(save)
    print(f"{imported.folder} holds {config.load}")
    if imported.is_text_part:
        print("only the language model was imported, not the image encoder")
    if imported.absent:
        print(f"not in the files, so with initial weights: {', '.join(imported.absent)}")
    if imported.left_out:
        print(imported.left_out)
    for measured in imported.measured:
        print(measured)
    print(in_this_installation(f"flags of {imported.script}:"))
    print(shlex.join([*imported.flags, "--load", config.save, "--finetune"]))


if __name__ == "__main__":
    run_tool(main)
