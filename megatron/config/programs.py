"""Sections of flags by program."""

from collections.abc import Mapping

from megatron.common.extensions import declared_in
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

_OWN: Mapping[str, tuple[type, ...]] = {
    "pretrain_gpt.py": _TRAINING,
    "pretrain_prefix_lm.py": _TRAINING,
    "finetune_t0.py": _TRAINING,
    "finetune_t0_non_causal_decoder.py": _TRAINING,
    "finetune_sft.py": _TRAINING,
    "tools/plan.py": (*_TRAINING, PlanningConfig),
    "tools/doctor.py": (*_TRAINING, DoctorConfig),
    "tools/watch.py": (WatchConfig,),
    "tools/make_ds_config.py": _TRAINING,
    "tools/preprocess_data.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        UrlConfig,
        WorkerTrialConfig,
    ),
    "tools/preprocess_data_many_cores.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        UrlConfig,
    ),
    "tools/preprocess_data_dist.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        UrlConfig,
        ShardConfig,
    ),
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

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    name: sections
    for programs in (_OWN, *declared_in("programs", "PROGRAMS"))
    for name, sections in programs.items()
}
"""Those of the core, and what extensions declare in their `programs.py`."""
