"""A trained T5: text-to-text generation and span infilling."""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.common.errors import DataError, raise_if_any
from megatron.config.inference.generation import DecodingConfig, candidate_problems
from megatron.extensions.t5.data import t5_vocabulary
from megatron.extensions.t5.inference_flags import TextToTextConfig
from megatron.inference.engine.encoder_decoder import (
    EncoderDecoderRunner,
    Generated,
    TextToTextRequest,
)
from megatron.inference.engine.encoder_runner import run_to_end
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.loading.loaded_model import prepare_encoder
from megatron.inference.loading.model_source import ModelSource
from megatron.tokenizer.types.tokenizer import Tokenizer

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True, kw_only=True)
class Output:
    """Text of the decoder.

    Args:
        text: sentinels in it as <extra_id_0>.
        filled: the input with the spans in place of its sentinels; None without a sentinel.
        is_finished: whether it ended before the maximum number of tokens.
    """

    text: str
    filled: str | None
    is_finished: bool


class TextToText:
    """A T5 that generates text from text.

    Args:
        runner: the network.
        rows: most texts at once.

    Raises:
        DataError: the tokenizer lacks special tokens or sentinels.
    """

    def __init__(self, runner: EncoderDecoderRunner, tokenizer: Tokenizer, *, rows: int = 1):
        self.runner, self.tokenizer, self.rows = runner, tokenizer, rows
        vocabulary = t5_vocabulary(tokenizer)
        self._bos, self._eos = vocabulary.special["bos"], vocabulary.special["eos"]
        self._sentinels = vocabulary.sentinels

    @property
    def max_length(self) -> int | None:
        """Most tokens of a text; None if the network has no limit."""
        spec = self.runner.spec
        return None if spec.relative_buckets else spec.max_position_embeddings

    def request(
        self, texts: Sequence[str], *, seeds: Sequence[str], **options: Any
    ) -> TextToTextRequest:
        """Return the request to generate the decoder's texts for `texts`.

        Args:
            seeds: of the random draws of each text.
            options: further fields of the request.

        Raises:
            DataError: a text has no tokens, too many, or a sentinel that the tokenizer lacks.
        """
        return TextToTextRequest(
            sources=tuple(tuple(self._source(text)) for text in texts),
            seeds=tuple(seeds),
            bos=self._bos,
            eos=self._eos,
            rows=self.rows,
            **options,
        )

    def output(self, source: Sequence[int], generated: Generated) -> Output:
        """Return the text that was generated for the tokens `source`."""
        text, filled = self._text(generated.tokens), self._filled(source, generated.tokens)
        return Output(text=text, filled=filled, is_finished=generated.is_finished)

    def _source(self, text: str) -> list[int]:
        """Return the tokens of the encoder."""
        tokens: list[int] = []
        for i, part in enumerate(_SENTINEL.split(text)):
            if i % 2 == 0:
                tokens += self.tokenizer.encode(part)
            elif int(part) < len(self._sentinels):
                tokens.append(self._sentinels[int(part)])
            else:
                raise DataError(
                    f"the text {text[:40]!r} has the sentinel <extra_id_{part}>; the tokenizer "
                    f"{self.tokenizer.name} has {len(self._sentinels)}, from <extra_id_0> on"
                )
        if not tokens:
            raise DataError(f"the text {text[:40]!r} has no tokens; give one that has some")
        if self.max_length is not None and len(tokens) > self.max_length:
            raise DataError(
                f"the text {text[:40]!r} has {len(tokens)} tokens; the network takes "
                f"{self.max_length}"
            )
        return tokens

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, with sentinels by name."""
        names = {token: f"<extra_id_{i}>" for i, token in enumerate(self._sentinels)}
        parts = []
        for sentinel, span in _spans(tokens, names):
            parts += [names[sentinel]] if sentinel is not None else []
            parts += [self.tokenizer.decode(span)] if span else []
        return " ".join(parts)

    def _filled(self, source: Sequence[int], new: Sequence[int]) -> str | None:
        """Return the text of `source` with the spans of `new`; a sentinel without one stays."""
        if not {*self._sentinels} & {*source}:
            return None
        spans = dict(_spans(new, self._sentinels))
        return self._text([t for token in source for t in spans.get(token, [token])])


def _spans(
    tokens: Sequence[int], sentinels: Container[int]
) -> Iterator[tuple[int | None, list[int]]]:
    """Yield each sentinel and the tokens behind it; first those in front of all, with None."""
    sentinel, span = None, list[int]()
    for token in tokens:
        if token in sentinels:
            yield sentinel, span
            sentinel, span = token, []
        else:
            span.append(token)
    yield sentinel, span


def load_text_to_text(source: ModelSource, options: DecodingConfig) -> tuple[TextToText, bool]:
    """Load the T5 of a checkpoint; return it, and whether this process is the first.

    Args:
        options: name the dtype.

    Raises:
        ConfigError: flags do not fit the network or the machine.
        WrongCheckpointError: the checkpoint holds another network.
        CheckpointError: it is damaged.

    Communication: every rank must call this, in step.
    """
    process = prepare_encoder(source, "texts", options)
    runner = process.build(EncoderDecoderRunner, source)
    rows = source.config.training.micro_batch_size
    return TextToText(runner, process.tokenizer, rows=rows), process.is_first


def generate_texts(
    model: TextToText, texts: Sequence[str], options: TextToTextConfig, *, seed: int
) -> Iterator[Output]:
    """Yield the output for each of `texts`, with random draws of its own.

    Raises:
        ConfigError: the flags do not fit the network.
        DataError: the network cannot take a text.

    Communication: every rank must call this, in step.
    """
    most = options.out_seq_length or model.runner.spec.decoder_seq_length
    raise_if_any(_problems(model, options, most))
    request = model.request(
        texts,
        seeds=[f"{seed}:{number}" for number in range(1, len(texts) + 1)],
        max_new_tokens=most,
        sampling=SamplingParams(
            greedy=options.greedy,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        ),
        beam_width=options.beam_width,
        length_penalty=options.length_penalty,
    )
    for first in range(0, len(texts), model.rows):
        rows = slice(first, first + model.rows)
        part = replace(request, sources=request.sources[rows], seeds=request.seeds[rows])
        found = run_to_end(part.run(model.runner))
        yield from map(model.output, part.sources, found)


def _problems(model: TextToText, options: TextToTextConfig, most: int) -> Iterator[str]:
    yield from candidate_problems(options, vocab_size=model.tokenizer.vocab_size)
    if model.max_length is not None and most > model.max_length:
        yield f"--out-seq-length {most} is more than the {model.max_length} positions of the network"
