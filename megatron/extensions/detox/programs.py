"""Sections of flags of the programs of detoxification."""

from collections.abc import Mapping

from megatron.config.config import SECTIONS as TRAINING
from megatron.config.inference.generation import GenerationConfig
from megatron.extensions.detox.flags import (
    AnnotationConfig,
    ContinuationsConfig,
    ScorerConfig,
    SelectionConfig,
    ToxicityConfig,
)

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "examples/detxoify_lm/generate_samples_gpt.py": (
        *TRAINING.values(),
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
