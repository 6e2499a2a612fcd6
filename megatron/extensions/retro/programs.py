"""Sections of flags of the programs of Retro."""

from collections.abc import Mapping

from megatron.config.config import SECTIONS as TRAINING
from megatron.config.inference.generation import GenerationConfig
from megatron.extensions.retro.flags import SECTIONS
from megatron.extensions.retro.inference_flags import AnswerConfig, AnswerScoreConfig
from megatron.extensions.retro.retrieval.flags import (
    RetroPreprocessingConfig,
    RetroRecallConfig,
)

_TRAINING = (*TRAINING.values(), *SECTIONS.values())

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "pretrain_retro.py": _TRAINING,
    "tools/retro/sft/sft_retro.py": _TRAINING,
    "tools/retro/preprocess_data.py": (RetroPreprocessingConfig,),
    "tools/retro/recall.py": (RetroPreprocessingConfig, RetroRecallConfig),
    "tools/retro/text_generation/retro_text_generation.py": (
        *_TRAINING,
        GenerationConfig,
        AnswerConfig,
    ),
    "tools/retro/text_generation/evaluate.py": (AnswerScoreConfig,),
}
