"""Sections of flags by program, for the page of all flags and for tests."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from megatron.common.extensions import PACKAGE, extension_names, sections_of
from megatron.config.config import SECTIONS
from megatron.config.data.tokenizer import TokenizerConfig
from megatron.config.inference.generation import GenerationConfig
from megatron.config.inference.server import ServingConfig
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
    WorkerTrialConfig,
)

_TRAINING = tuple(SECTIONS.values())
_RUN = (*_TRAINING, *sections_of("chaos").values())
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
    "tools/merge_preprocessed_data.py": (MergeConfig, UrlConfig),
    "tools/build_index.py": _TRAINING,
    "tools/inspect_data.py": (TokenizerConfig, InspectConfig, PluginModulesConfig, UrlConfig),
    "tools/sample_idxs_to_text.py": (*_TRAINING, SampleTextConfig),
    "tools/samples_of_step.py": (*_TRAINING, StepSamplesConfig),
    "tools/checkpoint/inspect.py": (LookConfig, UrlConfig),
    "tools/checkpoint/digest.py": (LookConfig, UrlConfig),
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
    "tools/convert_checkpoint/lora_to_peft.py": (AdapterConfig,),
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
        "tools/corpora/wikipedia.py": (*_PREPROCESSING, UrlConfig, "flags_fetch.WikipediaConfig"),
        "tools/corpora/published.py": (*_PREPROCESSING, UrlConfig, "flags_fetch.PublishedConfig"),
        "tools/corpora/fetch.py": ("flags_fetch.FetchConfig",),
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
        "tools/retro/preprocess_data.py": ("preprocessing_flags.RetroPreprocessingConfig",),
        "tools/retro/recall.py": (
            *(
                "preprocessing_flags.RetroPreprocessingConfig",
                "preprocessing_flags.RetroRecallConfig",
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
"""Those of the core, and of the extensions of this installation."""
