#!/usr/bin/env python
"""Generate text from text with a trained T5, and fill in the spans that sentinels stand for.

The network's sizes and the tokenizer come from the checkpoint in --load.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron.common import logging as log
from megatron.common.cli import read_lines
from megatron.common.errors import raise_if_any
from megatron.extensions.t5.inference_flags import TextToTextConfig, text_to_text_problems
from megatron.inference.loading.model_source import read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank


def main(argv: Sequence[str]) -> None:
    """Print the text that the T5 of the command line `argv` generates for each input."""
    log.configure(read_launch(None).rank, sys.stderr)
    source = read_model_source(argv, {"text_to_text": TextToTextConfig}, description=__doc__)
    options: TextToTextConfig = source.own["text_to_text"]
    raise_if_any(text_to_text_problems(options))
    file = options.input_file
    texts = (options.text or []) if file is None else read_lines("--input-file", file)

    # torch takes seconds to import, and wrong flags are reported at once
    from megatron.extensions.t5.inference import generate_texts, load_text_to_text

    model, is_first = load_text_to_text(source, options)
    if not is_first:
        model.engine.follow()
        return
    try:
        outputs = generate_texts(model, texts, options, seed=source.config.training.seed)
        for text, generated in zip(texts, outputs, strict=True):
            print(text)
            print(f"  output: {generated.text}{'' if generated.is_finished else ' ...'}")
            if generated.filled is not None:
                print(f"  filled: {generated.filled}")
    finally:
        model.engine.close()


if __name__ == "__main__":
    run_tool_or_rank(main)
