"""Console commands of an installed package: each runs its script, as Python itself would."""

import runpy
import sys
from pathlib import Path

SCRIPTS = {
    "megatron-train": "pretrain_gpt",
    "megatron-finetune-sft": "finetune_sft",
    "megatron-preprocess": "megatron_tools.preprocess_data",
    "megatron-merge": "megatron_tools.merge_preprocessed_data",
    "megatron-inspect-data": "megatron_tools.inspect_data",
    "megatron-generate": "megatron_tools.generate_samples_gpt",
    "megatron-serve": "megatron_tools.run_text_generation_server",
    "megatron-evaluate": "megatron_tasks.main",
    "megatron-plan": "megatron_tools.plan",
    "megatron-doctor": "megatron_tools.doctor",
    "megatron-watch": "megatron_tools.watch",
    "megatron-from-hf": "megatron_tools.convert_checkpoint.from_hf",
    "megatron-to-hf": "megatron_tools.convert_checkpoint.to_hf",
}
"""The module that each command runs; setup.py maps these packages to folders."""


def program() -> str:
    """Return the name of the program as the user typed it: a console command's, or the script's."""
    typed = next((word for word in sys.orig_argv[1:] if not word.startswith("-")), "")
    return Path(typed).name if Path(typed).name in SCRIPTS else Path(sys.argv[0]).name


def main() -> None:
    """Run the script of the command's name with the arguments of the command line."""
    # As __main__ in sys.modules, so that worker processes that are spawned import it again.
    runpy.run_module(SCRIPTS[Path(sys.argv[0]).name], run_name="__main__", alter_sys=True)
