"""Text-to-text generation by a trained T5: flags and checks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.inference.generation import DecodingConfig, beam_problems, sampling_problems
from megatron.config.parsing.declaration import setting


@dataclass(frozen=True, kw_only=True)
class TextToTextConfig(DecodingConfig):
    """Text-to-text generation and span infilling, by a T5; --micro-batch-size is the number of texts at once."""

    text: list[str] | None = None
    """Texts, each in quotes; <extra_id_0>, <extra_id_1> and so on stand for spans to be filled in."""

    input_file: str | None = None
    """File of texts, one a line."""

    out_seq_length: int | None = setting(None, at_least=1)
    """Maximum number of generated tokens (default: --decoder-seq-length of the training run)."""


def text_to_text_problems(options: TextToTextConfig) -> Iterator[str]:
    """Yield why there is nothing to do, and contradictions between the flags."""
    if (options.text is None) == (options.input_file is None):
        yield "give the texts with either --text or --input-file"
    yield from sampling_problems(options)
    yield from beam_problems(options, {})
