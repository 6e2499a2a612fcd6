#!/usr/bin/env python
"""Use a trained BERT: fill masks, score sentences and their order, write sentence embeddings.

The network's sizes and the tokenizer come from the checkpoint in --load.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

import numpy as np

from megatron.common import logging as log
from megatron.common.cli import read_lines
from megatron.common.errors import DataError, raise_if_any, reason
from megatron.extensions.bert.inference_flags import FillMaskConfig, fill_mask_problems
from megatron.inference.loading.model_source import read_model_source
from megatron.training.process.environment import read_launch
from megatron.training.process.launch import run_tool_or_rank

if TYPE_CHECKING:  # torch takes seconds to import, and wrong flags are reported at once
    from megatron.extensions.bert.inference import MaskedLM


def main(argv: Sequence[str]) -> None:
    """Print the output of the BERT of the command line `argv` for each text."""
    log.configure(read_launch(None).rank, sys.stderr)
    source = read_model_source(argv, {"fill_mask": FillMaskConfig}, description=__doc__)
    options: FillMaskConfig = source.own["fill_mask"]
    raise_if_any(fill_mask_problems(options))
    file = options.input_file
    texts = (options.text or []) if file is None else read_lines("--input-file", file)

    from megatron.extensions.bert.inference import load_masked_lm

    model, is_first = load_masked_lm(source)
    if options.output_bert_embeddings is None:
        model.require_tokens(texts)
        for text in texts:
            lines = [*lines_of(model, text, options.top)]  # by all ranks, in step
            if is_first:
                print(*lines, sep="\n")
        return
    embeddings = model.embed(texts)
    if not is_first:
        return
    try:
        np.save(options.output_bert_embeddings, embeddings)
    except OSError as error:
        file = options.output_bert_embeddings
        raise DataError(f"--output-bert-embeddings {file}: {reason(error, file)}") from error


def lines_of(model: "MaskedLM", text: str, top: int) -> Iterator[str]:
    """Yield the candidates of each mask of `text`; without masks, its score and its order's."""
    from megatron.extensions.bert.inference import mask_notice

    found = model.assess(text, top)
    yield text
    if notice := mask_notice(text):
        yield f"  notice: {notice}"
    for number, candidates in enumerate(found.masks, 1):
        tokens = ", ".join(f"{each.token} {each.probability:.3f}" for each in candidates)
        yield f"  mask {number}: {tokens}"
    if found.log_likelihood is not None:
        mean = found.log_likelihood / found.num_tokens
        yield (
            f"  pseudo-log-likelihood: {found.log_likelihood:.4f} | tokens: {found.num_tokens} | "
            f"per token: {mean:.4f}"
        )
    if found.in_order is not None:
        yield f"  probability of this order: {found.in_order:.4f}"


if __name__ == "__main__":
    run_tool_or_rank(main)
