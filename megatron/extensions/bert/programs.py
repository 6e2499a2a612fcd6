"""Sections of flags of the programs of BERT."""

from collections.abc import Mapping

from megatron.config.config import SECTIONS as TRAINING
from megatron.extensions.bert.flags import SECTIONS
from megatron.extensions.bert.inference_flags import FillMaskConfig

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "pretrain_bert.py": (*TRAINING.values(), *SECTIONS.values()),
    "tools/fill_mask.py": (*TRAINING.values(), FillMaskConfig),
}
