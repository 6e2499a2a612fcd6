#!/usr/bin/env python
"""Write the adapters of a checkpoint of --lora-rank in the format of Hugging Face's PEFT.

The model beside which they stand is what to_hf.py makes of the checkpoint that the finetuning
began from; to_hf.py of a checkpoint with adapters puts them into the weights.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.checkpointing.manifest import read_manifest
from megatron.checkpointing.names import checkpoint_of
from megatron.common.cli import run_tool
from megatron.config.parsing.flags import parse_sections
from megatron.config.tools.hugging_face import AdapterConfig


def main(argv: Sequence[str]) -> None:
    """Do what the command line `argv` asks for."""
    said = parse_sections(argv, {"adapter": AdapterConfig}, description=__doc__ or "").sections
    config: AdapterConfig = said["adapter"]
    source = checkpoint_of(Path(config.load))
    # Not above: torch is slow to import, and a wrong flag should not wait for it.
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
