"""Answers to a file of questions (InstructRetro): flags of generation and evaluation, checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.inference.generation import GenerationConfig
from megatron.config.parsing.declaration import range_problems, setting
from megatron.extensions.retro.instruct_flags import InstructConfig, context_problems


@dataclass(frozen=True, kw_only=True)
class QuestionRangeConfig:
    """Which questions of a file are answered."""

    gen_start_idx: int = setting(0, at_least=0)
    """Number of the first question, from 0."""

    num_gen: int | None = setting(None, at_least=1)
    """Number of questions (default: all from the first on)."""


@dataclass(frozen=True, kw_only=True)
class AnswerConfig(QuestionRangeConfig):
    """Answers to questions (tools/retro/text_generation/retro_text_generation.py)."""

    short_format: bool = False
    """Prompts of the form "Question: ... Answer: The answer is" after the contexts, without a system
    line."""


@dataclass(frozen=True, kw_only=True)
class AnswerScoreConfig(QuestionRangeConfig):
    """Exact match and F1 of answers (tools/retro/text_generation/evaluate.py)."""

    sample_input_file: str
    """File of questions with their right answers."""

    sample_output_file: str
    """File of the generated answers, one a line."""

    longform_answer: bool = False
    """The file of questions holds one JSON object a line, with the answer under longform_answer."""


def answer_problems(
    answers: AnswerConfig, generation: GenerationConfig, instruct: InstructConfig
) -> Iterator[str]:
    """Yield every contradiction between the flags of generated answers."""
    yield from range_problems(answers)
    yield from context_problems(instruct)
    if generation.sample_input_file is None:
        yield "--sample-input-file is missing: the file of questions"
    others = {
        "--prompt": generation.prompt is not None,
        "--num-samples": generation.num_samples != 0,
        "--genfile": generation.genfile is not None,
        "--logprobs": generation.logprobs,
        "--beam-width": generation.beam_width is not None,
    }
    for flag, given in others.items():
        if given:
            yield f"{flag} is for tools/generate_samples_gpt.py: leave it out"
