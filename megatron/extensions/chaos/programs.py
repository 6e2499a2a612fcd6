"""Sections of flags of a run with injected faults."""

from collections.abc import Mapping

from megatron.config.config import SECTIONS as TRAINING
from megatron.extensions.chaos.flags import SECTIONS

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "pretrain_gpt.py": (*TRAINING.values(), *SECTIONS.values())
}
