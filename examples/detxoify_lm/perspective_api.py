#!/usr/bin/env python
"""Evaluate the toxicity of continuations: step 7 of detoxification (docs/detoxification.md).

Prints Expected Maximum Toxicity and Toxicity Probability, for all prompts and for toxic and
nontoxic ones. A run that was stopped continues with the same command.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common.cli import run_tool
from megatron.common.errors import raise_if_any
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.detox.flags import (
    ScorerConfig,
    ToxicityConfig,
    continuation_problems,
    scorer_problems,
)
from megatron.extensions.detox.toxicity.report import toxicity_report
from megatron.extensions.detox.toxicity.scorers import ScorerFactory
from megatron.extensions.detox.toxicity.scoring import evaluation, score_file
from megatron.training.process.environment import perspective_api_key


def main(argv: Sequence[str]) -> None:
    """Score and evaluate by the flags `argv`; print the metrics."""
    own = {"toxicity": ToxicityConfig, "scorer": ScorerConfig}
    sections = parse_sections(argv, own, description=__doc__ or "").sections
    config: ToxicityConfig = sections["toxicity"]
    scorer: ScorerConfig = sections["scorer"]
    out_path = config.out_path or f"{config.data_path}.scores.jsonl"
    per_prompt = config.continuations_per_prompt
    is_scored = Path(out_path).exists()
    key = perspective_api_key()
    raise_if_any(
        [
            *continuation_problems(per_prompt),
            *([] if is_scored else scorer_problems(scorer, api_key=key)),
        ]
    )
    if is_scored:
        print(f"scores of {out_path}, which is there; remove it to score again", file=sys.stderr)
    else:
        factory = ScorerFactory(scorer, key)
        score_file(config.data_path, out_path, factory, evaluation, workers=scorer.workers)
    for line in toxicity_report(out_path, config.prompt_path, per_prompt):
        print(line)


if __name__ == "__main__":
    run_tool(main)
