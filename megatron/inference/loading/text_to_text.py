"""A trained T5 in one process: text-to-text generation and span infilling."""

import random
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.checkpointing.hugging_face.network import load_network
from megatron.common.errors import DataError, raise_if_any
from megatron.config.inference.generation import top_k_problems
from megatron.config.inference.text_to_text import TextToTextConfig
from megatron.config.network.model_spec import ModelSpec
from megatron.data.datasets.t5_dataset import t5_vocabulary
from megatron.inference.engine.sampling import SamplingParams, sample_tokens
from megatron.inference.loading.loaded_model import require_architecture, tokenizer_and_spec
from megatron.inference.loading.model_source import ModelSource
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import SequentialModel, in_turn
from megatron.model.t5 import DECODER_TOKENS
from megatron.tokenizer.types.tokenizer import Tokenizer

_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_ENCODER = 4  # entries of the list up to the encoder's norm, without the transformer layers


@dataclass(frozen=True)
class Generated:
    """Output of the decoder.

    Args:
        text: sentinels in it as <extra_id_0>.
        filled: the input with the spans in place of its sentinels; None without a sentinel.
        is_finished: whether it ended before the maximum number of tokens.
    """

    text: str
    filled: str | None
    is_finished: bool


class TextToText:
    """A T5 that generates text from text, in fp32.

    The encoder runs once for each text. The decoder has no KV cache: it recomputes all tokens for
    each new one.

    Args:
        model: built by `load_network`.
        device: what it computes on.

    Raises:
        DataError: the tokenizer lacks special tokens or sentinels.
    """

    def __init__(
        self, model: SequentialModel, spec: ModelSpec, tokenizer: Tokenizer, device: torch.device
    ):
        model.to(device)
        split = spec.num_layers + _ENCODER
        self._encoder, self._decoder = model.calls[:split], model.calls[split:]
        self.spec, self.tokenizer, self._device = spec, tokenizer, device
        vocabulary = t5_vocabulary(tokenizer)
        self._bos, self._eos = vocabulary.special["bos"], vocabulary.special["eos"]
        self._sentinels = vocabulary.sentinels

    @torch.no_grad()
    def generate(self, text: str, sampling: SamplingParams, *, most: int, seed: str) -> Generated:
        """Generate the decoder's text for `text`.

        Args:
            most: maximum number of generated tokens.
            seed: of the random draws of sampling.

        Raises:
            DataError: the text has no tokens, too many, or a sentinel that the tokenizer lacks.
        """
        source, draws = self._source(text), random.Random(seed)
        encoded = self._encode(source)
        tokens = [self._bos]
        while len(tokens) <= most and tokens[-1] != self._eos:
            row = torch.tensor([tokens], device=self._device)
            logits = in_turn(self._decoder, encoded._replace(batch={DECODER_TOKENS: row}))
            real = logits[:, -1, : self.tokenizer.vocab_size]
            tokens += sample_tokens(real, [sampling], [draws.random()], [len(tokens) - 1])
        is_finished = tokens[-1] == self._eos
        new = tokens[1:-1] if is_finished else tokens[1:]
        return Generated(self._text(new), self._filled(source, new), is_finished)

    def _encode(self, source: Sequence[int]) -> LayerInput:
        """Return the output of the encoder.

        Shapes: -> hidden [s, 1, h].
        """
        row = torch.tensor([source], device=self._device)
        lengths = torch.tensor([len(source)], device=self._device)
        encoded: LayerInput = in_turn(
            self._encoder, {"tokens": row, "lengths": lengths, DECODER_TOKENS: row[:, :0]}
        )
        return encoded

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
        rows = self.spec.max_position_embeddings
        if len(tokens) > rows and not self.spec.relative_buckets:
            raise DataError(
                f"the text {text[:40]!r} has {len(tokens)} tokens; the network takes {rows}"
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


def load_text_to_text(source: ModelSource, device: torch.device) -> TextToText:
    """Load the T5 of a checkpoint.

    Raises:
        WrongCheckpointError: it holds another network.
        CheckpointError: it is damaged.
    """
    tokenizer, spec = tokenizer_and_spec(source)
    require_architecture(source, spec, "t5")
    with source.weights() as full:
        return TextToText(load_network(spec, full), spec, tokenizer, device)


def generate_texts(
    model: TextToText, texts: Sequence[str], options: TextToTextConfig, *, seed: int
) -> Iterator[Generated]:
    """Yield the output for each of `texts`, with random draws of its own.

    Raises:
        ConfigError: the flags do not fit the network.
    """
    most = options.out_seq_length or model.spec.decoder_seq_length
    raise_if_any(_problems(model, options, most))
    sampling = SamplingParams(
        greedy=options.greedy,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
    )
    for number, text in enumerate(texts, 1):
        yield model.generate(text, sampling, most=most, seed=f"{seed}:{number}")


def _problems(model: TextToText, options: TextToTextConfig, most: int) -> Iterator[str]:
    yield from top_k_problems(options, vocab_size=model.tokenizer.vocab_size)
    rows = model.spec.max_position_embeddings
    if most > rows and not model.spec.relative_buckets:
        yield f"--out-seq-length {most} is more than the {rows} positions of the network"
