#!/usr/bin/env python
"""Generate texts to detoxify a GPT with, or to evaluate it: steps 1 and 6 (docs/detoxification.md).

--num-samples N --genfile FILE generates without prompts; --sample-input-file continues prompts of
RealToxicityPrompts, of which --num-samples takes the first. Output is one JSON object a line with
text, all_text, prompt and id. A run that was stopped continues with the same command.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.errors import DataError, raise_if_any
from megatron.config.inference.generation import GenerationConfig, generation_problems
from megatron.extensions.corpora.cleaning.records import read_lines, to_bytes
from megatron.extensions.corpora.cleaning.resumable import resumable_output
from megatron.extensions.detox.flags import ContinuationsConfig, continuation_problems
from megatron.extensions.detox.toxicity.report import prompt_of
from megatron.inference.loading.model_source import read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank

OUTPUT_FILES = ("genfile", "sample_input_file", "sample_output_file")


def main(argv: Sequence[str]) -> None:
    """Generate by the command line `argv`."""
    log.configure(read_launch(None).rank, sys.stderr)
    own = {"generation": GenerationConfig, "continuations": ContinuationsConfig}
    source = read_model_source(argv, own, description=__doc__)
    options: GenerationConfig = source.own["generation"]
    continuations: ContinuationsConfig = source.own["continuations"]
    per_prompt = continuations.continuations_per_prompt
    raise_if_any([*problems(options), *continuation_problems(per_prompt)])
    texts, file = read_texts(options, per_prompt)

    from megatron.inference.loading.loaded_model import load_model
    from megatron.inference.loading.text_generator import TextGenerator

    rows = max(source.config.training.micro_batch_size, options.beam_width or 0)
    loaded = load_model(source, options, rows=rows)
    seed = source.config.training.seed
    generator = TextGenerator(loaded, options, seed=seed)
    if not loaded.is_first:
        loaded.engine.follow()
        return
    made_by = {"checkpoint": str(source.folder), "seed": seed, **fingerprint(options, texts)}
    inputs = [options.sample_input_file] if options.sample_input_file else []
    with resumable_output(file, made_by, inputs=inputs) as output:
        first = output.earlier
        for i, done in enumerate(generator.generate(texts, skip=first), start=first):
            text = generator.text(done)
            record = {"text": text, "all_text": texts[i] + text, "prompt": texts[i], "id": i}
            output.write(to_bytes(record))
    loaded.engine.close()
    print(f"{file}: texts: {len(texts)} | of earlier attempts: {first}")


def problems(options: GenerationConfig) -> Iterator[str]:
    """Yield every contradiction between the flags."""
    if options.sample_input_file is not None:
        if options.num_samples < 0:
            yield f"--num-samples {options.num_samples} must be at least 0"
        options = replace(options, num_samples=0)
    elif options.num_samples < 1:
        yield "nothing to generate: give --num-samples and --genfile, or --sample-input-file"
    if options.prompt is not None or options.logprobs:
        yield "--prompt and --logprobs are for tools/generate_samples_gpt.py"
        options = replace(options, prompt=None, logprobs=False)
    yield from generation_problems(options)


def read_texts(options: GenerationConfig, per_prompt: int) -> tuple[list[str], str]:
    """Return the texts to continue, and the file to write; an empty text begins a document.

    Raises:
        DataError: the file of prompts cannot be read or has none.
    """
    file = options.sample_input_file
    if file is None:
        return [""] * options.num_samples, str(options.genfile)
    lines = islice(read_lines([file]), options.num_samples or None)
    texts = [text for line in lines for text in [prompt_of(line).text] * per_prompt]
    if not texts:
        raise DataError(f"--sample-input-file {file} has no prompt")
    return texts, options.sample_output_file or f"{file}.out"


def fingerprint(options: GenerationConfig, texts: Sequence[str]) -> dict[str, Any]:
    """Return what decides the output besides the model: an attempt with others does not continue."""
    sampling = {name: value for name, value in asdict(options).items() if name not in OUTPUT_FILES}
    return {**sampling, "texts": hashlib.sha256(json.dumps(texts).encode()).hexdigest()}


if __name__ == "__main__":
    run_tool_or_rank(main)
