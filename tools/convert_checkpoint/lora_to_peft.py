#!/usr/bin/env python
"""Export the LoRA adapters of a checkpoint (--lora-rank) to Hugging Face PEFT.

The base model is the to_hf.py export of the checkpoint that finetuning started from; to_hf.py of a
checkpoint with adapters merges them.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.publish import checkpoint_of
from megatron.common.cli import run_tool
from megatron.config.parsing.flags import parse_sections
from megatron.config.plugins import PluginModulesConfig, load_plugins, modules_in
from megatron.config.tools.hugging_face import AdapterConfig


def main(argv: Sequence[str]) -> None:
    """Run the tool with the command line `argv`."""
    load_plugins(modules_in(argv))
    sections = {"adapter": AdapterConfig, "plugins": PluginModulesConfig}
    parsed = parse_sections(argv, sections, description=__doc__ or "").sections
    config: AdapterConfig = parsed["adapter"]
    source = checkpoint_of(Path(config.load))
    # Imported here, after flags are checked: torch takes seconds.
    from megatron.checkpointing.hugging_face.peft import export_adapters

    family = export_adapters(
        source,
        read_manifest(source),
        Path(config.save),
        base=config.base_model,
        model_type=config.model_type,
    )
    print(f"{config.save} holds the adapters of {source} for a {family.architecture}")


if __name__ == "__main__":
    run_tool(main)
