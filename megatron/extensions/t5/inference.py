"""A trained T5: text-to-text generation and span infilling."""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.common.errors import DataError, raise_if_any
from megatron.config.inference.generation import DecodingConfig, candidate_problems
from megatron.config.network.model_spec import ModelSpec
from megatron.extensions.t5.data import t5_vocabulary
from megatron.extensions.t5.flags import DecoderSpec
from megatron.extensions.t5.inference_flags import TextToTextConfig
from megatron.inference.engine.beam_search import Beam, BeamSearchRequest
from megatron.inference.engine.continuous_batching import InferenceEngine
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.loading.loaded_model import prepare_encoder
from megatron.inference.loading.model_source import ModelSource
from megatron.inference.runner.model_runner import ModelRunner
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

    The decoder's text is a sequence of the engine, which begins with the BOS token; the encoder's
    text is its context.

    Args:
        engine: runs the network.

    Raises:
        DataError: the tokenizer lacks special tokens or sentinels.
    """

    def __init__(self, engine: InferenceEngine, tokenizer: Tokenizer):
        self.engine, self.tokenizer = engine, tokenizer
        vocabulary = t5_vocabulary(tokenizer)
        self._bos, self._eos = vocabulary.special["bos"], vocabulary.special["eos"]
        self._sentinels = vocabulary.sentinels

    @property
    def spec(self) -> ModelSpec:
        """The network."""
        return self.engine.runner.spec

    @property
    def max_length(self) -> int | None:
        """Most tokens of a text; None if the network has no limit."""
        spec = self.spec
        return None if spec.positions.relative_buckets else spec.positions.max_position_embeddings

    def requests(
        self,
        texts: Sequence[str],
        *,
        seeds: Sequence[str],
        max_new_tokens: int,
        sampling: SamplingParams | None = None,
    ) -> list[Request]:
        """Return the requests to generate the decoder's texts for `texts`.

        Args:
            seeds: of the random draws of each text.

        Raises:
            DataError: a text has no tokens, too many, or a sentinel that the tokenizer lacks.
        """
        return [
            Request(
                prompt=(self._bos,),
                contexts=(tuple(self._source(text)),),
                max_new_tokens=max_new_tokens,
                sampling=sampling or SamplingParams(),
                seed=seed,
                stop_tokens=frozenset({self._eos}),
            )
            for text, seed in zip(texts, seeds, strict=True)
        ]

    def output(self, request: Request, generated: Completion | Beam) -> Output:
        """Return the text that was generated for a request."""
        tokens, (source,) = generated.tokens, request.contexts
        is_finished = tokens[-1:] == (self._eos,)
        tokens = tokens[: len(tokens) - is_finished]
        return Output(
            text=self._text(tokens), filled=self._fill(source, tokens), is_finished=is_finished
        )

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

    def _fill(self, source: Sequence[int], new: Sequence[int]) -> str | None:
        """Return the text of `source` with the spans of `new`; a sentinel without one stays."""
        if not {*self._sentinels} & {*source}:
            return None
        spans = dict(_spans(new, self._sentinels))
        return self._text([t for token in source for t in spans.get(token, [token])])


def _spans(
    tokens: Sequence[int], sentinels: Container[int]
) -> Iterator[tuple[int | None, list[int]]]:
    """Yield each sentinel and the tokens after it; first the tokens before all sentinels, with None."""
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
    rows = max(source.config.training.micro_batch_size, options.beam_width or 0)
    # Packed weights make single texts slower.
    runner = process.build(partial(ModelRunner, rows=rows, packs_weights=False), source)
    engine = InferenceEngine(runner, rows=rows, tokenizer=process.tokenizer)
    return TextToText(engine, process.tokenizer), process.is_first


def generate_texts(
    model: TextToText, texts: Sequence[str], options: TextToTextConfig, *, seed: int
) -> Iterator[Output]:
    """Yield the output for each of `texts`, with independent random draws.

    Raises:
        ConfigError: the flags do not fit the network.
        DataError: the network cannot take a text.
    """
    most = options.out_seq_length or model.spec.part(DecoderSpec).decoder_seq_length
    raise_if_any(_problems(model, options, most))
    requests = model.requests(
        texts,
        seeds=[f"{seed}:{number}" for number in range(1, len(texts) + 1)],
        max_new_tokens=most,
        sampling=SamplingParams(
            greedy=options.greedy,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        ),
    )
    if options.beam_width is None:
        yield from map(model.output, requests, model.engine.generate(requests))
        return
    for request in requests:
        search = BeamSearchRequest.of(request, options.beam_width, options.length_penalty)
        yield model.output(request, model.engine.run_alone(search)[0])


def _problems(model: TextToText, options: TextToTextConfig, most: int) -> Iterator[str]:
    yield from candidate_problems(options, vocab_size=model.tokenizer.vocab_size)
    if model.max_length is not None and most > model.max_length:
        yield f"--out-seq-length {most} is more than the {model.max_length} positions of the network"
