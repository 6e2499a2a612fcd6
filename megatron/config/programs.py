"""Sections of flags by program."""

from collections.abc import Mapping

from megatron.common.extensions import extension_sections
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
from megatron.extensions.bert.inference_flags import FillMaskConfig
from megatron.extensions.corpora.flags import CleaningConfig
from megatron.extensions.corpora.flags_fetch import FetchConfig, PublishedConfig, WikipediaConfig
from megatron.extensions.detox.flags import (
    AnnotationConfig,
    ContinuationsConfig,
    ScorerConfig,
    SelectionConfig,
    ToxicityConfig,
)
from megatron.extensions.retro.inference_flags import AnswerConfig, AnswerScoreConfig
from megatron.extensions.retro.preprocessing_flags import (
    RetroPreprocessingConfig,
    RetroRecallConfig,
)
from megatron.extensions.t5.inference_flags import TextToTextConfig
from megatron.extensions.tasks.inference_flags import EnsembleConfig, HarnessConfig, TaskConfig

_TRAINING = tuple(SECTIONS.values())


def _training_of(extension: str) -> tuple[type, ...]:
    return (*_TRAINING, *extension_sections([extension]).values())


PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "pretrain_gpt.py": _TRAINING,
    "pretrain_prefix_lm.py": _TRAINING,
    "pretrain_bert.py": _training_of("bert"),
    "pretrain_t5.py": _training_of("t5"),
    "pretrain_retro.py": _TRAINING,
    "finetune_t0.py": _TRAINING,
    "finetune_t0_non_causal_decoder.py": _TRAINING,
    "finetune_sft.py": _TRAINING,
    "tools/retro/sft/sft_retro.py": _TRAINING,
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
    "tools/corpora/clean.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        CleaningConfig,
    ),
    "tools/corpora/wikipedia.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        UrlConfig,
        WikipediaConfig,
    ),
    "tools/corpora/published.py": (
        TokenizerConfig,
        PreprocessConfig,
        PluginModulesConfig,
        UrlConfig,
        PublishedConfig,
    ),
    "tools/retro/preprocess_data.py": (RetroPreprocessingConfig,),
    "tools/corpora/fetch.py": (FetchConfig,),
    "tools/merge_preprocessed_data.py": (MergeConfig, UrlConfig),
    "tools/retro/recall.py": (RetroPreprocessingConfig, RetroRecallConfig),
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
    "tools/convert_checkpoint/from_hf.py": (ImportConfig, UrlConfig),
    "tools/convert_checkpoint/lora_to_peft.py": (AdapterConfig,),
    "tools/convert_checkpoint/ds_to_universal.py": (UniversalConfig,),
    "tools/convert_checkpoint/deepspeed_to_deepspeed.py": (LayoutConfig, PluginModulesConfig),
    "tools/convert_checkpoint/deepspeed_to_megatron.py": (MegatronConfig,),
    "tools/convert_checkpoint/inspect_checkpoint.py": (FileConfig,),
    "tools/convert_checkpoint/inspect_deepspeed_checkpoint.py": (FilesConfig,),
    "tools/generate_samples_gpt.py": (*_TRAINING, GenerationConfig),
    "tools/retro/text_generation/retro_text_generation.py": (
        *_TRAINING,
        GenerationConfig,
        AnswerConfig,
    ),
    "tools/retro/text_generation/evaluate.py": (AnswerScoreConfig,),
    "tools/fill_mask.py": (*_TRAINING, FillMaskConfig),
    "tools/text_to_text.py": (*_TRAINING, TextToTextConfig),
    "tools/run_text_generation_server.py": (*_TRAINING, GenerationConfig, ServingConfig),
    "tasks/main.py": (*_TRAINING, TaskConfig),
    "tasks/token_classification.py": _TRAINING,
    "tasks/text_classification.py": _TRAINING,
    "tasks/question_answering.py": _TRAINING,
    "tasks/ensemble_classifier.py": (EnsembleConfig,),
    "tasks/eval_harness/evaluate.py": (*_TRAINING, HarnessConfig),
    "examples/detxoify_lm/generate_samples_gpt.py": (
        *_TRAINING,
        GenerationConfig,
        ContinuationsConfig,
    ),
    "examples/detxoify_lm/annotations/perspective_api_annotate.py": (
        AnnotationConfig,
        ScorerConfig,
    ),
    "examples/detxoify_lm/annotations/filter-selfgeneration.py": (SelectionConfig,),
    "examples/detxoify_lm/perspective_api.py": (ToxicityConfig, ScorerConfig),
}
