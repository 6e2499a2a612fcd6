"""Turn files of JSON lines into the token files (.bin and .idx) that training reads."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from anywhere

from megatron import log
from megatron.config.flags import parse_sections
from megatron.config.preprocess import PreprocessConfig
from megatron.config.tokenizer import TokenizerConfig
from megatron.data.preprocess import Written, input_problems, preprocess
from megatron.errors import ConfigError
from megatron.plan.tokenizer_plan import tokenizer_arguments
from megatron.tokenizer.build import build_tokenizer, tokenizer_problems
from megatron.tool import run_tool


def main(argv: Sequence[str]) -> None:
    """Convert as `argv` says, then say what was written."""
    sections = {"tokenizer": TokenizerConfig, "preprocess": PreprocessConfig}
    said = parse_sections(argv, sections, description=__doc__).sections
    config: PreprocessConfig = said["preprocess"]
    tokenizer: TokenizerConfig = said["tokenizer"]
    log.configure(rank=0)

    wishes = tokenizer_arguments(tokenizer)
    problems = [*tokenizer_problems(**wishes), *number_problems(config)]
    if problems:
        raise ConfigError(*problems, *input_problems(config.input, config.json_keys))
    for written in preprocess(
        config.input,
        output_prefix=config.output_prefix,
        json_keys=config.json_keys,
        make_encoder=partial(build_tokenizer, **wishes),
        append_eod=config.append_eod,
        workers=config.workers,
        chunk_size=config.chunk_size,
        log_interval=config.log_interval,
    ):
        print(summary(written))


def number_problems(config: PreprocessConfig) -> list[str]:
    """Return one sentence for each number that must be at least 1 and is not."""
    numbers = {
        "--workers": config.workers,
        "--chunk-size": config.chunk_size,
        "--log-interval": config.log_interval,
    }
    return [f"{flag} {number}: give 1 or more" for flag, number in numbers.items() if number < 1]


def summary(written: Written) -> str:
    """Return one line about a pair of token files."""
    return (
        f"{written.prefix}.bin, .idx: documents: {written.documents} | tokens: {written.tokens} | "
        f"bytes: {written.bytes} | documents without a token, left out: {written.dropped}"
    )


if __name__ == "__main__":
    run_tool(main)
