"""Sections of flags of the programs of downstream tasks."""

from collections.abc import Mapping

from megatron.config.config import SECTIONS as TRAINING
from megatron.extensions.tasks.flags import SECTIONS
from megatron.extensions.tasks.inference_flags import EnsembleConfig, HarnessConfig, TaskConfig

_LABELLED = (*TRAINING.values(), *SECTIONS.values())

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "tasks/main.py": (*_LABELLED, TaskConfig),
    "tasks/token_classification.py": _LABELLED,
    "tasks/text_classification.py": _LABELLED,
    "tasks/question_answering.py": _LABELLED,
    "tasks/ensemble_classifier.py": (EnsembleConfig,),
    "tasks/eval_harness/evaluate.py": (*TRAINING.values(), HarnessConfig),
}
