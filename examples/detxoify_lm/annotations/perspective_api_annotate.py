#!/usr/bin/env python
"""Annotate texts with their toxicity: step 2 of detoxification (docs/detoxification.md).

Adds the key score to each JSON object, null for an empty text. A run that was stopped continues
with the same command.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import raise_if_any
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.corpora.cleaning.records import read_lines
from megatron.extensions.detox.flags import (
    AnnotationConfig,
    ScorerConfig,
    annotation_problems,
    scorer_problems,
)
from megatron.extensions.detox.toxicity.report import distribution
from megatron.extensions.detox.toxicity.scorers import ScorerFactory
from megatron.extensions.detox.toxicity.scoring import annotation, score_file, toxicity_of
from megatron.training.process.environment import perspective_api_key


def main(argv: Sequence[str]) -> None:
    """Annotate by the flags `argv`; print the mean toxicity."""
    own = {"annotation": AnnotationConfig, "scorer": ScorerConfig}
    sections = parse_sections(argv, own, description=__doc__ or "").sections
    config: AnnotationConfig = sections["annotation"]
    scorer: ScorerConfig = sections["scorer"]
    key = perspective_api_key()
    raise_if_any([*annotation_problems(config), *scorer_problems(scorer, api_key=key)])
    out_path = config.out_path or f"{config.data_path}-annotated.jsonl"
    score_file(
        config.data_path,
        out_path,
        ScorerFactory(scorer, key),
        annotation,
        workers=scorer.workers,
        total=config.total,
    )
    scores = [toxicity_of(line) for line in read_lines([out_path])]
    known = [score for score in scores if score is not None]
    print(
        f"{out_path}: documents: {len(scores)} | without a score: {len(scores) - len(known)} | "
        f"toxicity: {distribution(known)}"
    )


if __name__ == "__main__":
    run_tool(main)
