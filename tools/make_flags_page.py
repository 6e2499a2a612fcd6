#!/usr/bin/env python
"""Print docs/flags.md, the list of all flags, from the fields in megatron/config/ and of extensions."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import ConfigError
from megatron.common.extensions import PACKAGE, extension_names, load_extension, sections_of
from megatron.config.config import SECTIONS
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.foreign_flags.legacy import LEGACY
from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.server import ServingConfig
from megatron.config.network.experts import ExpertConfig
from megatron.config.parsing.declaration import flags_of
from megatron.config.parsing.flags import (
    Legacy,
    argparse_keywords,
    default_text,
    field_docstrings,
    is_switch,
)
from megatron.config.parsing.titles import about, title_of
from megatron.config.plugins import PluginModulesConfig
from megatron.config.run.urls import UrlConfig
from megatron.config.tools.checkpoint_tools import (
    ConversionConfig,
    FileConfig,
    FilesConfig,
    LayoutConfig,
    LookConfig,
    MegatronConfig,
    PartitionsConfig,
    UniversalConfig,
    UpcycleConfig,
)
from megatron.config.tools.data_tools import (
    InspectConfig,
    SampleTextConfig,
    StepSamplesConfig,
)
from megatron.config.tools.diagnostics import DoctorConfig, WatchConfig
from megatron.config.tools.hugging_face import (
    AdapterConfig,
    ExportConfig,
    ImportConfig,
    TransformersConfig,
)
from megatron.config.tools.planning import PlanningConfig
from megatron.config.tools.preprocess import (
    MergeConfig,
    PreprocessConfig,
    ShardConfig,
    TokenizerTrainingConfig,
    WorkerTrialConfig,
)

INTRODUCTION = """\
# Flags

`python PROGRAM --help-all` prints what this page lists; `python tools/make_flags_page.py` writes it from \
the dataclasses in `megatron/config/`. How flags are given, also in files: \
[configuration.md](configuration.md).

The middle column is the type of the value, then its default; without one there, the default is in \
the text. A switch has no value, except where noted. Paths and names are *texts*; *texts*, *integers* and *numbers* are one or more, with spaces \
between. Other spellings of a flag are listed below it and mean the same.
"""

OTHER_SYSTEMS = """\
## Flags of other systems

A training command of Megatron-LM, of BigScience's Megatron-DeepSpeed or of DeepSpeed's own fork \
runs here as it is. A flag that decides nothing here is accepted, and the log says why. A flag \
for something that is not supported here is refused before anything starts, with what to write \
instead: all such flags of a command line at once, and unknown flags with the nearest known one.
"""

TYPES = {
    "int": ("integer", "integers"),
    "finite": ("number", "numbers"),
    "str": ("text", "texts"),
    "truth": ("switch, or True or False", ""),
}
"""Names of one value and of several, by the function that parses one."""


_TRAINING = tuple(SECTIONS.values())
_RUN = (*_TRAINING, *(each for name in ("hybrid", "chaos") for each in sections_of(name).values()))
_PREPROCESSING = (TokenizerConfig, PreprocessConfig, PluginModulesConfig)

_OWN: Mapping[str, tuple[type, ...]] = {
    "pretrain_gpt.py": _RUN,
    "pretrain_prefix_lm.py": _RUN,
    "finetune_t0.py": _RUN,
    "finetune_t0_non_causal_decoder.py": _RUN,
    "finetune_sft.py": _RUN,
    "tools/plan.py": (*_TRAINING, PlanningConfig),
    "tools/doctor.py": (*_TRAINING, DoctorConfig),
    "tools/watch.py": (WatchConfig,),
    "tools/make_ds_config.py": _TRAINING,
    "tools/preprocess_data.py": (*_PREPROCESSING, UrlConfig, WorkerTrialConfig),
    "tools/preprocess_data_many_cores.py": (*_PREPROCESSING, UrlConfig),
    "tools/preprocess_data_dist.py": (*_PREPROCESSING, UrlConfig, ShardConfig),
    "tools/train_tokenizer.py": (TokenizerTrainingConfig,),
    "tools/merge_preprocessed_data.py": (MergeConfig, UrlConfig),
    "tools/build_index.py": _TRAINING,
    "tools/inspect_data.py": (TokenizerConfig, InspectConfig, PluginModulesConfig, UrlConfig),
    "tools/sample_idxs_to_text.py": (*_TRAINING, SampleTextConfig),
    "tools/samples_of_step.py": (*_TRAINING, StepSamplesConfig),
    "tools/checkpoint/inspect.py": (LookConfig, UrlConfig),
    "tools/checkpoint/digest.py": (LookConfig, UrlConfig),
    "tools/checkpoint/upcycle.py": (UpcycleConfig, ExpertConfig, UrlConfig),
    "tools/checkpoint/util.py": (*_TRAINING, ConversionConfig),
    "tools/merge_mp_partitions.py": (*_TRAINING, PartitionsConfig),
    "tools/convert_checkpoint/to_hf.py": (
        TokenizerConfig,
        ExportConfig,
        PluginModulesConfig,
        UrlConfig,
    ),
    "tools/convert_checkpoint/deepspeed_to_transformers.py": (
        TransformersConfig,
        PluginModulesConfig,
    ),
    "tools/convert_checkpoint/from_hf.py": (ImportConfig, PluginModulesConfig, UrlConfig),
    "tools/convert_checkpoint/lora_to_peft.py": (AdapterConfig, PluginModulesConfig),
    "tools/convert_checkpoint/ds_to_universal.py": (UniversalConfig,),
    "tools/convert_checkpoint/deepspeed_to_deepspeed.py": (LayoutConfig, PluginModulesConfig),
    "tools/convert_checkpoint/deepspeed_to_megatron.py": (MegatronConfig,),
    "tools/convert_checkpoint/inspect_checkpoint.py": (FileConfig,),
    "tools/convert_checkpoint/inspect_deepspeed_checkpoint.py": (FilesConfig,),
    "tools/generate_samples_gpt.py": (*_TRAINING, GenerationConfig),
    "tools/run_text_generation_server.py": (*_TRAINING, GenerationConfig, ServingConfig),
}

_RUN_WITH_OWN = (*_RUN, "own")

_OF_EXTENSIONS: Mapping[str, Mapping[str, tuple[type | str, ...]]] = {
    "bert": {
        "pretrain_bert.py": _RUN_WITH_OWN,
        "tools/fill_mask.py": (*_TRAINING, "inference_flags.FillMaskConfig"),
    },
    "corpora": {
        "tools/corpora/clean.py": (*_PREPROCESSING, "flags.CleaningConfig"),
        "tools/corpora/wikipedia.py": (*_PREPROCESSING, UrlConfig, "flags.WikipediaConfig"),
        "tools/corpora/published.py": (*_PREPROCESSING, UrlConfig, "flags.PublishedConfig"),
        "tools/corpora/fetch.py": ("flags.FetchConfig",),
    },
    "detox": {
        "examples/detxoify_lm/generate_samples_gpt.py": (
            *(*_TRAINING, GenerationConfig, "flags.ContinuationsConfig"),
        ),
        "examples/detxoify_lm/annotations/perspective_api_annotate.py": (
            *("flags.AnnotationConfig", "flags.ScorerConfig"),
        ),
        "examples/detxoify_lm/annotations/filter-selfgeneration.py": ("flags.SelectionConfig",),
        "examples/detxoify_lm/perspective_api.py": ("flags.ToxicityConfig", "flags.ScorerConfig"),
    },
    "retro": {
        "pretrain_retro.py": _RUN_WITH_OWN,
        "tools/retro/sft/sft_retro.py": _RUN_WITH_OWN,
        "tools/retro/preprocess_data.py": ("retrieval.flags.RetroPreprocessingConfig",),
        "tools/retro/recall.py": (
            *(
                "retrieval.flags.RetroPreprocessingConfig",
                "retrieval.flags.RetroRecallConfig",
            ),
        ),
        "tools/retro/text_generation/retro_text_generation.py": (
            *(*_TRAINING, "own", GenerationConfig, "inference_flags.AnswerConfig"),
        ),
        "tools/retro/text_generation/evaluate.py": ("inference_flags.AnswerScoreConfig",),
    },
    "t5": {
        "pretrain_t5.py": _RUN_WITH_OWN,
        "tools/text_to_text.py": (*_TRAINING, "inference_flags.TextToTextConfig"),
    },
    "tasks": {
        "tasks/main.py": (*_RUN_WITH_OWN, "inference_flags.TaskConfig"),
        "tasks/token_classification.py": _RUN_WITH_OWN,
        "tasks/text_classification.py": _RUN_WITH_OWN,
        "tasks/question_answering.py": _RUN_WITH_OWN,
        "tasks/ensemble_classifier.py": ("inference_flags.EnsembleConfig",),
        "tasks/eval_harness/evaluate.py": (*_TRAINING, "inference_flags.HarnessConfig"),
    },
}
"""Programs of extensions: "own" stands for their sections of a run, a text for another class of theirs."""


def _sections(extension: str, section: type | str) -> Iterator[type]:
    if isinstance(section, type):
        yield section
    elif section == "own":
        yield from sections_of(extension).values()
    else:
        module, _, name = section.rpartition(".")
        yield getattr(import_module(f"{PACKAGE}.{extension}.{module}"), name)


PROGRAMS: Mapping[str, tuple[type, ...]] = {
    **_OWN,
    **{
        program: tuple(each for section in sections for each in _sections(extension, section))
        for extension in extension_names()
        for program, sections in _OF_EXTENSIONS.get(extension, {}).items()
    },
}
"""Programs of the core, and of the extensions of this installation."""


def main(argv: Sequence[str]) -> None:
    """Print the page.

    Raises:
        ConfigError: a word was given.
    """
    if argv:
        raise ConfigError(f"{argv[0]}: this program takes no flags and prints the page")
    print(page(), end="")


def page() -> str:
    """Return the text of the page; as --help-all, it names the parts of all extensions."""
    for name in extension_names():
        load_extension(name)
    sections = list(dict.fromkeys(each for own in PROGRAMS.values() for each in own))
    return "\n".join(
        [
            INTRODUCTION,
            *_program_lines(),
            *(line for section in sections for line in _section_lines(section)),
            OTHER_SYSTEMS,
            *_legacy_lines("### Accepted", "what happens", lambda flag: not flag.refused),
            *_read_lines(),
            *_legacy_lines("### Refused", "why, or what to write", lambda flag: flag.refused),
        ]
    )


def _program_lines() -> Iterator[str]:
    training = list(SECTIONS.values())
    yield "## Programs\n"
    yield f"*Training* stands for {', '.join(map(_link, training))}.\n"
    yield "| program | its sections |"
    yield "|---|---|"
    for program, sections in PROGRAMS.items():
        listed = [section for section in sections if section not in training]
        if set(training) <= set(sections):
            names = ["*training*", *map(_link, listed)]
        else:
            names = [_link(section) for section in sections]
        yield f"| `{program}` | {', '.join(names)} |"
    yield ""


def _section_lines(section: type) -> Iterator[str]:
    yield f"## {title_of(section)}\n"
    yield f"{_text(about(section))}\n"
    yield "| flag | value | meaning |"
    yield "|---|---|---|"
    helps = field_docstrings(section)
    for flag in flags_of(section):
        option, *older = flag.options
        names = "<br>".join([f"`{option}`", *(f"or `{spelling}`" for spelling in older)])
        yield f"| {names} | {_value(argparse_keywords(flag))} | {_text(helps[flag.name])} |"
    yield ""


def _value(keywords: dict[str, Any]) -> str:
    """Return the type of a flag's value and its default, in words."""
    if is_switch(keywords):
        return "switch"
    several = keywords.get("nargs") == "+"
    if choices := keywords.get("choices"):
        kind = " or ".join(f"`{choice}`" for choice in choices)
    else:
        kind = TYPES.get(keywords["type"].__name__, TYPES["str"])[several]
    if keywords.get("required"):
        return f"{kind}; **required**"
    shown = default_text(keywords)
    return f"{kind}; " + " ".join(f"`{word}`" for word in shown.split()) if shown else kind


def _read_lines() -> Iterator[str]:
    """Yield the table of flags whose values stand for flags of ours."""
    yield "### Read as ours\n"
    yield "| flag | value | is read as | other values |"
    yield "|---|---|---|---|"
    for flag in (each for each in LEGACY if each.becomes):
        for value, words in flag.becomes.items():
            shown = {"": "", "*": "any"}.get(value, f"`{value}`")
            ours = f"`{words}`".replace("|", "\\|") if words else "nothing changes"
            others = "" if "*" in flag.becomes else _text(flag.reason)
            yield f"| `{flag.option}` | {shown} | {ours} | {others} |"
    yield ""


def _legacy_lines(heading: str, column: str, has: Callable[[Legacy], bool]) -> Iterator[str]:
    """Yield the table of flags without a field; flags with the same sentence share a line."""
    by_reason: dict[str, list[str]] = {}
    for flag in LEGACY:
        if not flag.becomes and has(flag):
            only = f" (without {flag.only_with}: no effect)" if flag.only_with else ""
            by_reason.setdefault(flag.reason + only, []).append(f"`{flag.option}`")
    yield f"{heading}\n"
    yield f"| flag | {column} |"
    yield "|---|---|"
    for reason, flags in by_reason.items():
        yield f"| {', '.join(flags)} | {_text(reason)} |"
    yield ""


def _link(section: type) -> str:
    title = title_of(section)
    return f"[{title}](#{title.lower().replace(' ', '-')})"


def _text(text: str) -> str:
    """Return `text` in one line of Markdown: flags and tokens as code, nothing of it a mark."""
    line = re.sub(r"([|*])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![\w-])--[\w-]*\w|<\w+>", r"`\g<0>`", line)


if __name__ == "__main__":
    run_tool(main)
