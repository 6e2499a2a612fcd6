#!/usr/bin/env python
"""Answer a file of questions with a finetuned Retro or GPT (InstructRetro).

A prompt has the first contexts of its question; the encoder of a Retro reads the next contexts, or
with --reuse-top the same. The output has one answer a line. The name of the question set, which
decides the form of a prompt, is taken from the file name: nq of nq_QA_dev.json.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.errors import DataError, raise_if_any, reason
from megatron.config.architecture.architecture import network_of
from megatron.config.inference.generation import GenerationConfig, generation_problems
from megatron.extensions.retro.data_questions import (
    Prompts,
    QAItem,
    encoder_contexts,
    items_in_range,
    question_set_of,
    read_qa_items,
)
from megatron.extensions.retro.flags import RetroSpec
from megatron.extensions.retro.inference_flags import AnswerConfig, answer_problems
from megatron.extensions.retro.instruct_flags import InstructConfig
from megatron.inference.loading.model_source import read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank

if TYPE_CHECKING:  # torch takes seconds to import, and wrong flags are reported at once
    from megatron.inference.engine.sequence import Request
    from megatron.inference.loading.loaded_model import LoadedModel
    from megatron.inference.loading.text_generator import TextGenerator


def main(argv: Sequence[str]) -> None:
    """Generate answers by the command line `argv`."""
    log.configure(read_launch(None).rank)
    sections = {"generation": GenerationConfig, "answers": AnswerConfig}
    source = read_model_source(argv, sections, description=__doc__)
    options: GenerationConfig = source.own["generation"]
    answers: AnswerConfig = source.own["answers"]
    instruct: InstructConfig = source.config.section(InstructConfig)
    raise_if_any([*generation_problems(options), *answer_problems(answers, options, instruct)])
    file = str(options.sample_input_file)
    items = read_qa_items(
        Path(file),
        is_retrieved=instruct.use_retrieved_neighbours,
        is_longform=instruct.longform_answer,
        needs_answers=False,
    )
    items = items_in_range(items, answers.gen_start_idx, answers.num_gen)

    from megatron.inference.loading.loaded_model import load_model
    from megatron.inference.loading.text_generator import TextGenerator

    rows = source.config.training.micro_batch_size
    loaded = load_model(source, options, rows=rows, services=("prompts", "neighbors"))
    generator = TextGenerator(loaded, options, seed=source.config.training.seed)
    if not loaded.is_first:
        loaded.engine.follow()
        return
    prompts = Prompts(
        tokenizer=loaded.tokenizer,
        name=question_set_of(file),
        num_contexts=instruct.ft_neighbours,
        retrieves=network_of(loaded.spec).retrieves,
        is_short=answers.short_format,
    )
    requests = [*_requests(items, prompts, instruct, loaded, generator)]
    _write(options.sample_output_file or f"{file}.out", requests, generator)
    loaded.engine.close()


def _requests(
    items: Sequence[QAItem],
    prompts: Prompts,
    instruct: InstructConfig,
    loaded: "LoadedModel",
    generator: "TextGenerator",
) -> "Iterator[Request]":
    """Yield the request to answer each question."""
    room = loaded.engine.max_length - generator.options.out_seq_length
    retro = loaded.spec.part(RetroSpec)
    for item in items:
        neighbors: list[list[int]] = []
        if prompts.retrieves:
            neighbors = encoder_contexts(
                item,
                loaded.tokenizer,
                first=0 if instruct.reuse_top else instruct.ft_neighbours,
                count=retro.retro_num_neighbors,
                length=retro.retro_retrieved_length,
            )
        yield generator.request_of(prompts.tokens(item, room), neighbors)


def _write(file: str, requests: "Sequence[Request]", generator: "TextGenerator") -> None:
    """Write one answer a line, up to the end of its document.

    Raises:
        DataError: the file cannot be written.
    """
    completions = generator.complete(requests)
    try:
        with open(file, "w", encoding="utf-8") as out:
            for done in completions:
                text = generator.text(done).partition("<|endoftext|>")[0]
                out.write(" ".join(text.split()) + "\n")
    except OSError as error:
        raise DataError(f"--sample-output-file {file}: {reason(error, file)}") from error
    print(f"wrote {len(requests)} answers to {file}")


if __name__ == "__main__":
    run_tool_or_rank(main)
