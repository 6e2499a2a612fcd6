#!/usr/bin/env python
"""Print the exact match and the F1 of generated answers, in percent.

Questions without a right answer are left out.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it runs from anywhere

from megatron.common.cli import read_lines, run_tool
from megatron.common.errors import DataError, raise_if_any
from megatron.config.parsing.declaration import range_problems
from megatron.config.parsing.flags import parse_sections
from megatron.extensions.retro.data_questions import answer_scores, items_in_range, read_qa_items
from megatron.extensions.retro.inference_flags import AnswerScoreConfig


def main(argv: Sequence[str]) -> None:
    """Score the answers that the command line `argv` names.

    Raises:
        DataError: there is not one answer for each question.
    """
    parsed = parse_sections(argv, {"scores": AnswerScoreConfig}, description=__doc__ or "")
    config: AnswerScoreConfig = parsed.sections["scores"]
    raise_if_any(range_problems(config))
    items = read_qa_items(
        Path(config.sample_input_file),
        is_retrieved=False,
        is_longform=config.longform_answer,
        needs_answers=False,
    )
    items = items_in_range(items, config.gen_start_idx, config.num_gen)
    answers = read_lines("--sample-output-file", config.sample_output_file)
    if len(answers) != len(items):
        raise DataError(
            f"{config.sample_output_file} has {len(answers)} answers to the {len(items)} questions of "
            f"{config.sample_input_file}; --gen-start-idx and --num-gen must be those of generation"
        )
    pairs = [pair for pair in zip(answers, items, strict=True) if pair[1].answers]
    if not pairs:
        raise DataError(f"{config.sample_input_file} has no right answers")
    scores = answer_scores(*zip(*pairs, strict=True))
    percent = {name: f"{100 * score:.2f}" for name, score in scores.items()}
    print(f"exact match: {percent['exact_match']} | F1: {percent['f1']} | questions: {len(pairs)}")


if __name__ == "__main__":
    run_tool(main)
