"""Sections of flags of the programs of T5."""

from collections.abc import Mapping

from megatron.config.config import SECTIONS as TRAINING
from megatron.extensions.t5.flags import SECTIONS
from megatron.extensions.t5.inference_flags import TextToTextConfig

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "pretrain_t5.py": (*TRAINING.values(), *SECTIONS.values()),
    "tools/text_to_text.py": (*TRAINING.values(), TextToTextConfig),
}
