"""Console commands of an installed package: each runs its script, as Python itself would."""

import ast
import difflib
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from megatron.common.version import VERSION

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

VERBS = {
    **{command.removeprefix("megatron-"): module for command, module in SCRIPTS.items()},
    "pretrain-bert": "pretrain_bert",
    "pretrain-prefix-lm": "pretrain_prefix_lm",
    "pretrain-retro": "pretrain_retro",
    "pretrain-t5": "pretrain_t5",
    "train-tokenizer": "megatron_tools.train_tokenizer",
    "inspect": "megatron_tools.checkpoint.inspect",
    "convert": "megatron_tools.checkpoint.util",
    "upcycle": "megatron_tools.checkpoint.upcycle",
    "reshard": "megatron_tools.convert_checkpoint.deepspeed_to_deepspeed",
    "lora-to-peft": "megatron_tools.convert_checkpoint.lora_to_peft",
    "why-step": "megatron_tools.why_step",
}
"""The module that `megatron VERB` runs."""

NAMES = {**{f"megatron {verb}": module for verb, module in VERBS.items()}, **SCRIPTS}
"""By what is typed, the module that it runs."""

_COMPLETION = Path(__file__).with_name("completion.bash")


def program() -> str:
    """Return the name of the program as the user typed it: a console command's, or the script's."""
    words = [word for word in sys.orig_argv[1:] if not word.startswith("-")]
    typed = [Path(words[0]).name, *words[1:2]] if words else [""]
    named = " ".join(typed[: 2 if typed[0] == "megatron" else 1])
    return named if named in NAMES else Path(sys.argv[0]).name


def main() -> None:
    """Run the script of the command's name with the arguments of the command line."""
    # As __main__ in sys.modules, so that worker processes that are spawned import it again.
    runpy.run_module(SCRIPTS[Path(sys.argv[0]).name], run_name="__main__", alter_sys=True)


def run_verb() -> None:
    """Run the script of the first argument, as `megatron train`, with the arguments that follow it."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help"):
        print("usage: megatron VERB [flags]\n")
        print(*(f"  {name:20}{_first_line(VERBS[name])}" for name in VERBS), sep="\n")
        print(
            "\n`megatron VERB --help` lists its flags; `megatron completion` is for bash and zsh."
        )
    elif verb == "--version":
        print(f"megatron {VERSION}")
    elif verb == "completion":
        print(_COMPLETION.read_text(encoding="utf-8"), end="")
    elif verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`megatron --help` lists all"
        print(f"error: megatron {verb}: there is no such verb; {hint}", file=sys.stderr)
        sys.exit(2)
    else:
        del sys.argv[1]
        runpy.run_module(VERBS[verb], run_name="__main__", alter_sys=True)


def _first_line(module: str) -> str:
    """Return the first line of a module's docstring, without importing it."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].partition(": `")[0]
