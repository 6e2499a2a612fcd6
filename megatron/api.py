"""Public API for scripts and notebooks: make_config, pretrain, generate, and the registries of plugins.

Imports no torch, so that `--plugin` can import modules that only add flags quickly. docs/api.md lists
what else is public.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.train_state import TrainState
from megatron.common.errors import ConfigError, ExitCode, MegatronError, raise_if_any
from megatron.common.registry import (
    ACTIVATIONS,
    ATTENTIONS,
    DATASETS,
    EXPORTERS,
    FAMILIES,
    HOOKS,
    METRICS,
    NETWORKS,
    NORMS,
    OBJECTIVES,
    OPTIMIZERS,
    POSITION_EMBEDDINGS,
    SCHEDULES,
    TOKENIZERS,
    Registry,
)
from megatron.config.config import Config, parse_config, words_of
from megatron.config.inference.generation import GenerationConfig, generation_problems
from megatron.optimizer.schedule import lr_decay
from megatron.training.entry import train
from megatron.training.loop.loop import Hook, StepResult, require_hooks
from megatron.training.process.launch import run_rank

if TYPE_CHECKING:
    from megatron.objectives.objective import Objective

__all__ = [
    "ACTIVATIONS",
    "ATTENTIONS",
    "DATASETS",
    "EXPORTERS",
    "FAMILIES",
    "HOOKS",
    "METRICS",
    "NETWORKS",
    "NORMS",
    "OBJECTIVES",
    "OPTIMIZERS",
    "POSITION_EMBEDDINGS",
    "SCHEDULES",
    "TOKENIZERS",
    "Config",
    "ConfigError",
    "ExitCode",
    "Hook",
    "MegatronError",
    "Registry",
    "StepResult",
    "TrainState",
    "generate",
    "lr_decay",
    "make_config",
    "pretrain",
    "run_rank",
]


def make_config(**flags: Any) -> Config:
    """Return the Config of keyword arguments, checked as flags are.

    Names are those of flags, with underscores: `make_config(num_layers=2, bf16=True)`. Values follow
    the rules of a `--config` file, which `config="run.yaml"` reads too; a dictionary groups flags
    under a heading. Sections of flags that were registered take part.

    Raises:
        ConfigError: a flag is unknown, missing or malformed; lists every problem.
    """
    return parse_config(words_of(flags))[0]


def pretrain(
    config: Config, *, objective: "str | Objective" = "", hooks: Sequence[Hook] = ()
) -> ExitCode:
    """Train in this process, which is one rank if a launcher has started several.

    Args:
        objective: an instance, or a name; default: that of the config, else "gpt".
        hooks: act before and after each step, on every rank.

    Raises:
        MegatronError: the config, the data or the checkpoint cannot be used; nothing is lost.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            f"pretrain: expected a Config, found {type(config).__name__}; "
            "make_config(num_layers=2, ...) makes one"
        )
    require_hooks(hooks, "hooks:")
    return train(config, objective or config.plugins.objective or "gpt", hooks=hooks)


def generate(prompts: Sequence[str], **flags: Any) -> list[str]:
    """Return the continuation of each prompt by a trained GPT; [] on all ranks but the first.

    Names are those of the flags of tools/generate_samples_gpt.py, with underscores:
    `generate(["The"], load="run", out_seq_length=20, greedy=True)`. The network and the tokenizer are
    those of the checkpoint.

    Raises:
        ConfigError: a flag is unknown, missing or malformed, or a prompt is too long.
        CheckpointError: there is no checkpoint of a GPT in `load`, or it is damaged.
    """
    if isinstance(prompts, str):
        raise ConfigError(f"generate: expected a list of prompts, found a str; write [{prompts!r}]")
    # Imported here: they import torch.
    from megatron.inference.loading.loaded_model import load_model
    from megatron.inference.loading.model_source import read_model_source
    from megatron.inference.loading.text_generator import TextGenerator

    sections = {"generation": GenerationConfig}
    source = read_model_source(words_of(flags, sections), sections, description=None)
    options: GenerationConfig = source.own["generation"]
    raise_if_any(generation_problems(options))
    loaded = load_model(source, options, rows=max(len(prompts), options.beam_width or 0))
    if not loaded.is_first:
        loaded.engine.follow()
        return []
    generator = TextGenerator(loaded, options, seed=source.config.training.seed)
    try:
        return [generator.text(done) for done in generator.generate(prompts)]
    finally:
        loaded.engine.close()
