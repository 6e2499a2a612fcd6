"""Headings of the sections of flags, in --help and in docs/flags.md, and what comes first."""

import re
from inspect import getdoc

BASICS = (
    *("config", "num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    *("micro_batch_size", "global_batch_size", "train_iters", "lr", "data_path"),
    *("tokenizer_type", "vocab_file", "merge_file", "save", "save_interval", "load", "bf16"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "zero_stage"),
)
"""Fields of the flags that a first training run needs, in the order of its help."""

BASICS_OF_TOKENIZERS = (
    *("tokenizer_type", "tokenizer_name_or_path", "vocab_file", "merge_file", "tokenizer_model"),
)
"""Fields of the flags that choose a tokenizer."""

BASICS_OF_MODELS = (
    *("load", "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("device", "plugin"),
)
"""Fields of the flags that programs need which use a trained model."""

TITLES = {
    "ExpertConfig": "Experts",
    "LoraConfig": "LoRA",
    "PredictionConfig": "Multi-token prediction",
    "ParallelConfig": "Parallelism",
    "TrainingConfig": "Steps and batches",
    "MaskConfig": "Masks",
    "FimConfig": "Fill in the middle",
    "MaskedLMConfig": "Masked language modelling",
    "DeepSpeedConfig": "DeepSpeed",
    "UrlConfig": "Files at URLs",
    "PluginConfig": "Plugins",
    "PluginModulesConfig": "Plugins of a checkpoint",
    "PreprocessConfig": "Preprocessing",
    "WorkerTrialConfig": "Number of workers",
    "TokenizerTrainingConfig": "Training of a tokenizer",
    "ShardConfig": "Shards",
    "MergeConfig": "Merging token files",
    "InspectConfig": "Token files to inspect",
    "SampleTextConfig": "Samples to show",
    "StepSamplesConfig": "Steps to trace",
    "LookConfig": "Checkpoint to inspect",
    "FileConfig": "File to inspect",
    "FilesConfig": "Files to inspect",
    "ConversionConfig": "Conversion between systems",
    "PartitionsConfig": "Partitions of Megatron-LM",
    "ExportConfig": "To Hugging Face",
    "TransformersConfig": "To Hugging Face with older flags",
    "ImportConfig": "From Hugging Face",
    "AdapterConfig": "Adapters to PEFT",
    "UniversalConfig": "Universal checkpoint",
    "LayoutConfig": "To another layout",
    "MegatronConfig": "To Megatron-LM",
    "DownstreamConfig": "Downstream tasks",
    "TextTaskConfig": "Text tasks",
    "TaskConfig": "Zero-shot tasks",
    "HarnessConfig": "Tasks of lm_eval",
    "ScorerConfig": "Toxicity scorer",
    "AnnotationConfig": "Annotation of toxicity",
    "SelectionConfig": "Selection by toxicity",
    "ContinuationsConfig": "Continuations of prompts",
    "ToxicityConfig": "Toxicity of continuations",
    "WikipediaConfig": "Dump of Wikipedia",
    "PublishedConfig": "Published data set",
    "FetchConfig": "Fetching of web pages",
}
"""Headings of the sections whose class is not called what a reader would look for."""


def title_of(section: type) -> str:
    """Return the heading of a section: the words of its class's name."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", section.__name__.removesuffix("Config"))
    return TITLES.get(section.__name__, words.capitalize())


def about(section: type) -> str:
    """Return the text under the heading of a section."""
    return getdoc(section) or ""
