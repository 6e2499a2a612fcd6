"""Text generation: encodes prompts, runs the engine or a beam search, and decodes the output."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron.common.errors import raise_if_any
from megatron.config.inference.generation import GenerationConfig
from megatron.inference.engine.beam_search import BeamSearchRequest
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Completion, CompletionBuilder, Request
from megatron.inference.loading.detokenizer import Detokenizer, IncrementalDetokenizer
from megatron.inference.loading.loaded_model import LoadedModel
from megatron.inference.runner.logprobs import TokenLogprob

log = logging.getLogger(__name__)


class TextGenerator:
    """Generates text with the options of one command line.

    Args:
        seed: of the random draws; each text has its own.
    """

    def __init__(self, loaded: LoadedModel, options: GenerationConfig, *, seed: int):
        self.engine, self.tokenizer = loaded.engine, loaded.tokenizer
        self.options, self.seed = options, seed
        self.sampling = SamplingParams(
            greedy=options.greedy,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        self.detokenizer = Detokenizer(
            tokenizer=loaded.tokenizer,
            stop_tokens=frozenset((loaded.tokenizer.eod, *(options.stop_tokens or ()))),
            stop_strings=tuple(options.stop_strings or ()),
        )
        self._num_requests = 0

    def request(self, text: str) -> Request:
        """Return the request to continue `text`; an empty text begins a document."""
        return self.request_of(self.tokenizer.encode(text) or [self.tokenizer.eod])

    def request_of(self, prompt: Sequence[int], contexts: Sequence[Sequence[int]] = ()) -> Request:
        """Return the request to continue the tokens `prompt`; for `contexts` see `Request`."""
        self._num_requests += 1
        return Request(
            prompt=tuple(prompt),
            contexts=tuple(map(tuple, contexts)),
            max_new_tokens=self.options.out_seq_length,
            sampling=self.sampling,
            seed=f"{self.seed}:{self._num_requests}",
            stop_tokens=self.detokenizer.stop_tokens,
            stop_strings=self.detokenizer.stop_strings,
            logprobs=self.options.logprobs,
            prompt_logprobs=self.options.logprobs and not self.engine.runner.sees_prefix,
        )

    def generate(self, texts: Iterable[str], *, skip: int = 0) -> Iterator[Completion]:
        """Return the completion of each text, in their order, as soon as it is finished.

        Args:
            skip: number of texts, from the first, that are not continued, as earlier attempts did;
                the other texts keep their seeds.

        Raises:
            ConfigError: lists every text that is too long; nothing is generated.
        """
        return self.complete([self.request(text) for text in texts], skip=skip)

    def complete(self, requests: Sequence[Request], *, skip: int = 0) -> Iterator[Completion]:
        """Return the completion of each request: see `generate`."""
        raise_if_any(
            f"prompt {number}: {problem}"
            for number, request in enumerate(requests, start=1)
            for problem in self.engine.problems(request)
        )
        width = self.options.beam_width
        if width is None:
            return self._with_warning(self.engine.generate(requests[skip:]))
        return self._with_warning(self._best_beam(request, width) for request in requests[skip:])

    def stream(self, text: str) -> Iterator[str]:
        """Yield the continuation of `text` in parts, as soon as they are stable.

        Raises:
            ConfigError: the text is too long.
        """
        request = self.request(text)
        if self.options.beam_width is not None:
            for done in self._with_warning([self._best_beam(request, self.options.beam_width)]):
                yield self.text(done)
            return
        self.engine.add(request)
        detokenizer = IncrementalDetokenizer(self.detokenizer, request.prompt)
        completion = CompletionBuilder(request.prompt)
        while self.engine.is_busy:
            for event in self.engine.step():
                completion.add(event)
                token = event.new_token.token if event.new_token else None
                yield detokenizer.add(token, is_last=event.finish_reason is not None)
        yield from ("" for _ in self._with_warning([completion.build()]))

    def text(self, done: Completion) -> str:
        """Return the generated text, without the stop token or stop string."""
        return self.detokenizer.text(done.prompt, done.tokens)

    def sample(self, done: Completion) -> dict[str, Any]:
        """Return a completion as a JSON object."""
        record: dict[str, Any] = {
            "text": self.text(done),
            "length": len(done.tokens),
            "finished": done.finish_reason == "stop",
        }
        if self.options.logprobs:
            record["prompt_tokens"] = list(done.prompt)
            record["prompt_logprobs"] = done.prompt_logprobs
            record["tokens"] = list(done.tokens)
            record["logprobs"] = [one.logprob for one in done.new_tokens]
        return record

    def _with_warning(self, completions: Iterable[Completion]) -> Iterator[Completion]:
        """Yield completions; then log how many lack tokens, as a sequence has no more positions."""
        total = cut = 0
        for done in completions:
            total += 1
            is_short = len(done.tokens) < self.options.out_seq_length
            cut += is_short and done.finish_reason == "length"
            yield done
        if cut:
            log.warning(
                "%d of %d texts end before --out-seq-length %d tokens, as prompt and text together "
                "fill the %d positions of a sequence",
                *(cut, total, self.options.out_seq_length, self.engine.max_length),
            )

    def _best_beam(self, request: Request, width: int) -> Completion:
        best, *_ = self.engine.run_alone(
            BeamSearchRequest.of(request, width, self.options.length_penalty)
        )
        ended = best.tokens[-1] in request.stop_tokens
        return Completion(
            prompt=request.prompt,
            new_tokens=tuple(TokenLogprob(token=token) for token in best.tokens),
            finish_reason="stop" if ended else "length",
        )
