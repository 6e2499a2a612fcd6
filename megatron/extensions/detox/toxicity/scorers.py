"""Toxicity scorers: the Perspective API, a transformers classifier, alt-profanity-check, a function."""

import importlib
import math
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, near, needed_for
from megatron.extensions.detox.flags import PERSPECTIVE, PROFANITY_CHECK, TRANSFORMERS, ScorerConfig
from megatron.extensions.detox.toxicity.perspective import PerspectiveAPI
from megatron.tokenizer.types.hugging_face import load_problem

TOXICITY = "toxicity"
Scores = dict[str, float]
Scorer = Callable[[Sequence[str]], list[Scores | None]]
"""Returns for each text its scores between 0 and 1, TOXICITY among them; None if it cannot."""


@dataclass(frozen=True)
class ScorerFactory:
    """Builds a scorer, in each process that scores."""

    config: ScorerConfig
    api_key: str = field(default="", repr=False)

    def __call__(self) -> Scorer:
        """Return the scorer of the flags.

        Raises:
            ConfigError: its package, folder or function is missing.
        """
        config: ScorerConfig = self.config
        if config.scorer == PERSPECTIVE:
            return PerspectiveAPI(
                self.api_key, config.perspective_url, max_retries=config.max_retries
            )
        if config.scorer == TRANSFORMERS:
            return transformers_classifier(str(config.scorer_model), config.toxic_label)
        if config.scorer == PROFANITY_CHECK:
            return FunctionScorer(config.scorer, _profanity_check())
        return FunctionScorer(config.scorer, _function(config.scorer))

    @property
    def options(self) -> dict[str, Any]:
        """The options that decide the scores."""
        return {
            "scorer": self.config.scorer,
            "scorer_model": self.config.scorer_model,
            "toxic_label": self.config.toxic_label,
        }


@dataclass(frozen=True)
class FunctionScorer:
    """Scores texts with a function that returns toxicities, or dictionaries of scores.

    Args:
        name: of --scorer, for messages.
    """

    name: str
    function: Callable[[list[str]], Iterable[Any]]

    def __call__(self, texts: Sequence[str]) -> list[Scores | None]:
        """Return the scores of each text.

        Raises:
            ConfigError: the function raises, or does not return the scores of the texts.
        """
        try:
            values = list(self.function(list(texts)))
        except Exception as error:
            raise ConfigError(f"--scorer {self.name}: {type(error).__name__}: {error}") from error
        if len(values) != len(texts):
            raise ConfigError(
                f"--scorer {self.name} returned {len(values)} scores for {len(texts)} texts"
            )
        return [self._scores(value) for value in values]

    def _scores(self, value: Any) -> Scores | None:
        if value is None:
            return None
        try:
            named = value if isinstance(value, Mapping) else {TOXICITY: value}
            scores = {str(name): float(score) for name, score in named.items()}
            is_valid = TOXICITY in scores and all(0 <= s <= 1 for s in scores.values())
        except (TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise ConfigError(
                f"--scorer {self.name} returned {value!r} for a text: expected a number between 0 "
                f"and 1, a dictionary of such numbers with the key {TOXICITY}, or None"
            )
        return scores


def _profanity_check() -> Callable[[list[str]], Iterable[Any]]:
    with needed_for(f"--scorer {PROFANITY_CHECK}", "alt-profanity-check"):
        from profanity_check import predict_prob
    return predict_prob


def _function(name: str) -> Callable[[list[str]], Iterable[Any]]:
    """Return the function MODULE:NAME or FILE.py:NAME.

    Raises:
        ConfigError: there is none.
    """
    place, _, attribute = name.rpartition(":")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"--scorer {name}: there is no file {place}{near(Path(place))}")
    try:
        if place.endswith(".py"):
            names = runpy.run_path(place)
        else:
            names = vars(importlib.import_module(place))
    except Exception as error:
        raise ConfigError(
            f"--scorer {name}: {place} cannot be imported: {type(error).__name__}: {error}; a module "
            "must be installed or on PYTHONPATH"
        ) from error
    if not callable(names.get(attribute)):
        raise ConfigError(f"--scorer {name}: {place} has no function {attribute}")
    return names[attribute]


def transformers_classifier(folder: str, toxic_label: str | None) -> Scorer:
    """Return a scorer with the sequence classifier in `folder`, on a GPU if there is one.

    A classifier with one label, or of independent labels, has a sigmoid for each label; any other
    a softmax over all labels. Texts are cut off at the classifier's maximum length.

    Raises:
        ConfigError: there is no classifier, it needs custom code, or none of its labels is the
            toxic one.
    """
    if not Path(folder, "config.json").is_file():
        raise ConfigError(
            f"--scorer-model {folder}: no model in transformers' format is there (no config.json)"
            f"{near(Path(folder))}"
        )
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--scorer-model {folder}: {load_problem(error)}") from error
    labels = [str(model.config.id2label[i]).lower() for i in range(model.config.num_labels)]
    toxic = _toxic_label(labels, toxic_label, folder)
    is_multi_label = model.config.problem_type == "multi_label_classification"
    is_independent = is_multi_label or len(labels) == 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    positions = getattr(model.config, "max_position_embeddings", None) or math.inf
    most_tokens = int(min(tokenizer.model_max_length, positions))

    def score(texts: Sequence[str]) -> list[Scores | None]:
        # A batch of texts of several lengths needs a padding token.
        groups = [list(texts)] if tokenizer.pad_token else [[text] for text in texts]
        found: list[Scores | None] = []
        for group in groups:
            batch = tokenizer(
                group,
                padding=len(group) > 1,
                truncation=True,
                max_length=most_tokens,
                return_tensors="pt",
            )
            with torch.inference_mode():
                logits = model(**batch.to(device)).logits.double()
            probabilities = logits.sigmoid() if is_independent else logits.softmax(-1)
            for row in probabilities.tolist():
                scores = dict(zip(labels, row, strict=True))
                found.append({TOXICITY: scores.pop(toxic), **scores})
        return found

    return score


def _toxic_label(labels: Sequence[str], wanted: str | None, folder: str) -> str:
    names = [wanted.lower()] if wanted else [TOXICITY, "toxic"]
    for name in names:
        if name in labels:
            return name
    raise ConfigError(
        f"--scorer-model {folder} has the labels {', '.join(labels)}: name the toxic one with "
        "--toxic-label"
    )
