#!/usr/bin/env python
"""Continue text with a trained GPT: a prompt, a file of prompts, nothing at all, or what is typed.

The network's sizes and the tokenizer are those of the checkpoint; flags that repeat them must
agree.
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
from megatron.common.errors import ConfigError, DataError, raise_if_any, reason
from megatron.config.inference.generation import GenerationConfig, generation_problems
from megatron.inference.loading.model_source import read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank

if TYPE_CHECKING:  # torch takes seconds to import, and wrong flags are told at once
    from megatron.inference.loading.text_generator import Writer


def main(argv: Sequence[str]) -> None:
    """Generate what the command line `argv` asks for."""
    log.configure(read_launch(None).rank)
    source = read_model_source(argv, {"generation": GenerationConfig}, description=__doc__)
    wishes: GenerationConfig = source.own["generation"]
    rows = max(source.config.training.micro_batch_size, wishes.beam_width or 0)
    raise_if_any(generation_problems(wishes))
    prompts = read_prompts(wishes)

    from megatron.inference.loading.loaded_model import load_model
    from megatron.inference.loading.text_generator import Writer

    loaded = load_model(source, wishes, rows=rows)
    writer = Writer(loaded, wishes, seed=source.config.training.seed)
    if not loaded.is_first:
        loaded.engine.follow()
        return
    if wishes.num_samples:
        write_samples(wishes, writer)
    elif prompts:
        write_continuations(wishes, prompts, writer)
    else:
        converse(writer)
    loaded.engine.close()


def read_prompts(wishes: GenerationConfig) -> list[str]:
    """Return the texts to continue; none when they are typed in, or made up.

    Raises:
        DataError: the file cannot be read or is empty.
    """
    if wishes.sample_input_file is None:
        return [wishes.prompt] if wishes.prompt is not None else []
    try:
        text = Path(wishes.sample_input_file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--sample-input-file {wishes.sample_input_file}: {reason(error, wishes.sample_input_file)}"
        ) from error
    if not text:
        raise DataError(f"--sample-input-file {wishes.sample_input_file} is empty")
    # Not splitlines: that would also cut at characters that only look like ends of lines.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def write_samples(wishes: GenerationConfig, writer: "Writer") -> None:
    """Write texts made up from nothing to --genfile, one JSON object a line."""
    started_at, tokens = time.perf_counter(), 0
    with new_file("--genfile", str(wishes.genfile)) as out:
        for done in writer.continued([""] * wishes.num_samples):
            out.write(json.dumps(writer.sample(done)) + "\n")
            tokens += len(done.tokens)
    told = speed(tokens, started_at)
    print(f"wrote {wishes.num_samples} samples to {wishes.genfile} ({told})")


def write_continuations(wishes: GenerationConfig, prompts: Sequence[str], writer: "Writer") -> None:
    """Write every prompt and what follows it: to the terminal, or to the output file."""
    started_at, tokens = time.perf_counter(), 0
    file = wishes.sample_output_file
    if wishes.sample_input_file is not None:
        file = file or wishes.sample_input_file + ".out"
    continued = writer.continued(prompts)
    with new_file("--sample-output-file", file) if file else nullcontext(sys.stdout) as out:
        for prompt, done in zip(prompts, continued, strict=True):
            if file and file.endswith(".jsonl"):
                out.write(json.dumps({"context": prompt, **writer.sample(done)}) + "\n")
            else:
                out.write(f"Context:\n{prompt}\n\nMegatron-LM:\n{writer.text(done)}\n\n")
            out.flush()
            tokens += len(done.tokens)
    if file:
        print(f"wrote {len(prompts)} continued prompts to {file} ({speed(tokens, started_at)})")


def new_file(flag: str, file: str) -> TextIO:
    """Return `file`, empty and open.

    Raises:
        DataError: it cannot be written to.
    """
    try:
        return open(file, "w", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{flag} {file}: {reason(error, file)}") from error


def converse(writer: "Writer") -> None:
    """Continue what is typed, a line at a time, until "stop" or the end of the input."""
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
            for part in writer.parts(prompt):
                print(part, end="", flush=True)
        except ConfigError as error:
            print(error)


def speed(tokens: int, started_at: float) -> str:
    """Return what to tell of so many tokens."""
    seconds = time.perf_counter() - started_at
    return f"{tokens} tokens in {seconds:.1f} s, {tokens / max(seconds, 1e-9):.1f} tokens/s"


if __name__ == "__main__":
    run_tool_or_rank(main)
