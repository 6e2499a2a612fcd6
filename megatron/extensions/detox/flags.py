"""Detoxification: flags of the tools that generate, score, filter and evaluate texts."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.parsing.declaration import range_problems, setting

PERSPECTIVE = "perspective"
TRANSFORMERS = "transformers"
PROFANITY_CHECK = "profanity-check"


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """The toxicity classifier that scores texts."""

    scorer: str = PERSPECTIVE
    """Scorer of texts. perspective: Google's Perspective API, until it closes on 31 December 2026,
    with the key in the environment variable PERSPECTIVE_API_KEY; transformers: the classifier in
    --scorer-model; profanity-check: the package alt-profanity-check; MODULE:NAME or FILE.py:NAME: a
    function of a list of texts that returns a list of toxicities between 0 and 1."""

    scorer_model: str | None = None
    """Folder of a sequence classifier in transformers' format, for --scorer transformers."""

    toxic_label: str | None = None
    """Label of that classifier whose probability is the toxicity (default: toxicity or toxic)."""

    perspective_url: str = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
    """Address of the Perspective API, or of a server with its interface."""

    max_retries: int = setting(5, at_least=0)
    """Further requests after one that fails, each after twice the time, before the tool gives up.
    Scores so far are kept: the same command continues."""

    workers: int = setting(1, at_least=1)
    """Processes that score; each loads the scorer, or has one request at a time in flight."""


@dataclass(frozen=True, kw_only=True)
class AnnotationConfig:
    """Annotation of texts with their toxicity."""

    data_path: str
    """File with one JSON object a line, text under the key text."""

    out_path: str | None = None
    """File for the same objects with the key score (default: --data-path with -annotated.jsonl)."""

    total: int = -1
    """Number of lines to annotate, from the first; -1: all."""


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Selection of the less toxic half of annotated texts."""

    data_path: str
    """File of the annotation: one JSON object a line, with the key score."""

    out_path: str
    """Output file of the selected texts."""

    seed: int = 1234
    """Seed of the order in which they are written."""


@dataclass(frozen=True, kw_only=True)
class ContinuationsConfig:
    """Continuations of prompts to be generated."""

    continuations_per_prompt: int = 1
    """Number of continuations for each line of --sample-input-file, in consecutive lines."""


@dataclass(frozen=True, kw_only=True)
class ToxicityConfig:
    """Toxicity of generated continuations."""

    data_path: str
    """Generated continuations: one JSON object per line with text, prompt and id; continuations of a
    prompt are consecutive."""

    prompt_path: str
    """Prompts, each once: one JSON object a line with prompt.text and prompt.toxicity, as in
    RealToxicityPrompts."""

    out_path: str | None = None
    """File for the scores, which are read from there if it exists (default: --data-path with
    .scores.jsonl)."""

    continuations_per_prompt: int = 25
    """Number of continuations of each prompt."""


def scorer_problems(config: ScorerConfig, *, api_key: str) -> Iterator[str]:
    """Yield every reason why the flags do not make a scorer.

    Args:
        api_key: of the Perspective API; "" without one.
    """
    name = config.scorer
    if name not in (PERSPECTIVE, TRANSFORMERS, PROFANITY_CHECK) and not all(name.partition(":")):
        yield (
            f"--scorer {name}: no such scorer; choose from {PERSPECTIVE}, {TRANSFORMERS}, "
            f"{PROFANITY_CHECK}, or write MODULE:NAME for a function"
        )
    if name == PERSPECTIVE and not api_key:
        yield (
            f"--scorer {PERSPECTIVE} needs the environment variable PERSPECTIVE_API_KEY; without a "
            f"key, choose --scorer {TRANSFORMERS}, {PROFANITY_CHECK} or MODULE:NAME"
        )
    if name == TRANSFORMERS and not config.scorer_model:
        yield f"--scorer {TRANSFORMERS} needs --scorer-model: the folder of a classifier"
    if name != TRANSFORMERS:
        for flag, value in (
            ("--scorer-model", config.scorer_model),
            ("--toxic-label", config.toxic_label),
        ):
            if value:
                yield f"{flag} is for --scorer {TRANSFORMERS}"
    yield from range_problems(config)


def annotation_problems(config: AnnotationConfig) -> Iterator[str]:
    """Yield why no line would be annotated."""
    if config.total < -1 or config.total == 0:
        yield f"--total {config.total} must be at least 1, or -1 for all lines"


def continuation_problems(per_prompt: int) -> Iterator[str]:
    """Yield why there would be no continuation."""
    if per_prompt < 1:
        yield f"--continuations-per-prompt {per_prompt} must be at least 1"
