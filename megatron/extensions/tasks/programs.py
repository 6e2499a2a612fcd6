"""Sections of flags of the programs of downstream tasks."""

from collections.abc import Mapping

from megatron.config.config import SECTIONS as TRAINING
from megatron.extensions.tasks.inference_flags import EnsembleConfig, HarnessConfig, TaskConfig

PROGRAMS: Mapping[str, tuple[type, ...]] = {
    "tasks/main.py": (*TRAINING.values(), TaskConfig),
    "tasks/token_classification.py": tuple(TRAINING.values()),
    "tasks/text_classification.py": tuple(TRAINING.values()),
    "tasks/question_answering.py": tuple(TRAINING.values()),
    "tasks/ensemble_classifier.py": (EnsembleConfig,),
    "tasks/eval_harness/evaluate.py": (*TRAINING.values(), HarnessConfig),
}
