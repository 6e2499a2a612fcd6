#!/usr/bin/env python
"""Generate text with a trained GPT: for a prompt, a file of prompts, typed prompts, or without any.

The network's sizes and the tokenizer come from the checkpoint; flags that repeat them must agree.
"""

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import read_lines
from megatron.common.errors import ConfigError, DataError, raise_if_any, reason
from megatron.config.inference.generation import GenerationConfig, generation_problems
from megatron.inference.loading.model_source import read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank

if TYPE_CHECKING:  # torch takes seconds to import, and wrong flags are reported at once
    from megatron.inference.loading.text_generator import TextGenerator


def main(argv: Sequence[str]) -> None:
    """Generate samples by the command line `argv`."""
    log.configure(read_launch(None).rank, sys.stderr)
    source = read_model_source(argv, {"generation": GenerationConfig}, description=__doc__)
    options: GenerationConfig = source.own["generation"]
    rows = max(source.config.training.micro_batch_size, options.beam_width or 0)
    raise_if_any(generation_problems(options))
    prompts = read_prompts(options)

    from megatron.inference.loading.loaded_model import load_model
    from megatron.inference.loading.text_generator import TextGenerator

    loaded = load_model(source, options, rows=rows)
    generator = TextGenerator(loaded, options, seed=source.config.training.seed)
    if not loaded.is_first:
        loaded.engine.follow()
        return
    if options.num_samples:
        write_samples(options, generator)
    elif prompts:
        write_continuations(options, prompts, generator)
    else:
        converse(generator)
    loaded.engine.close()


def read_prompts(options: GenerationConfig) -> list[str]:
    """Return the texts to continue; none if they are typed, or not needed.

    Raises:
        DataError: the file cannot be read or is empty.
    """
    if options.sample_input_file is None:
        return [options.prompt] if options.prompt is not None else []
    return read_lines("--sample-input-file", options.sample_input_file)


def write_samples(options: GenerationConfig, generator: "TextGenerator") -> None:
    """Write texts generated without a prompt to --genfile, one JSON object a line."""
    started_at, tokens = time.perf_counter(), 0
    with new_file("--genfile", str(options.genfile)) as out:
        for done in generator.generate([""] * options.num_samples):
            out.write(json.dumps(generator.sample(done)) + "\n")
            tokens += len(done.tokens)
    summary = speed(tokens, started_at)
    print(f"wrote {options.num_samples} samples to {options.genfile} ({summary})")


def write_continuations(
    options: GenerationConfig, prompts: Sequence[str], generator: "TextGenerator"
) -> None:
    """Write every prompt with its continuation, to the terminal or to the output file."""
    started_at, tokens = time.perf_counter(), 0
    file = options.sample_output_file
    if options.sample_input_file is not None:
        file = file or options.sample_input_file + ".out"
    continued = generator.generate(prompts)
    with new_file("--sample-output-file", file) if file else nullcontext(sys.stdout) as out:
        for prompt, done in zip(prompts, continued, strict=True):
            if file and file.endswith(".jsonl"):
                out.write(json.dumps({"context": prompt, **generator.sample(done)}) + "\n")
            else:
                out.write(f"Context:\n{prompt}\n\nMegatron-LM:\n{generator.text(done)}\n\n")
            out.flush()
            tokens += len(done.tokens)
    if file:
        print(f"wrote {len(prompts)} continued prompts to {file} ({speed(tokens, started_at)})")


def new_file(flag: str, file: str) -> TextIO:
    """Return `file`, empty and open.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        return open(file, "w", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {file}: {reason(error, file)}") from error


def converse(generator: "TextGenerator") -> None:
    """Continue typed prompts, a line each, until "stop" or the end of the input."""
    while True:
        print("\nContext prompt (stop to exit) >>> ", end="", flush=True)
        line = sys.stdin.readline()
        prompt = line.rstrip("\r\n")
        if not line or prompt == "stop":
            print()
            return
        if not prompt:
            continue
        try:
            for part in generator.stream(prompt):
                print(part, end="", flush=True)
        except ConfigError as error:
            print(error)


def speed(tokens: int, started_at: float) -> str:
    """Format the number of tokens and the speed of their generation."""
    seconds = time.perf_counter() - started_at
    return f"{tokens} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"


if __name__ == "__main__":
    run_tool_or_rank(main)
