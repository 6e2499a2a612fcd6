"""Texts in, texts out: what is between a front end and the engine."""

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.common.errors import raise_if_any
from megatron.config.inference.generation import GenerationConfig
from megatron.inference.engine.beam_search import Search
from megatron.inference.engine.request import Completion, Request
from megatron.inference.engine.sampling import Sampling
from megatron.inference.loading.incremental_detokenizer import Parts, Spelling
from megatron.inference.loading.loaded_model import LoadedModel


class Writer:
    """Continues texts as the wishes of one command line say.

    Args:
        seed: what the draws follow from; each text has draws of its own.
    """

    def __init__(self, loaded: LoadedModel, wishes: GenerationConfig, *, seed: int):
        self.engine, self.tokenizer = loaded.engine, loaded.tokenizer
        self.wishes, self.seed = wishes, seed
        self.sampling = Sampling(
            greedy=wishes.greedy,
            temperature=wishes.temperature,
            top_k=wishes.top_k,
            top_p=wishes.top_p,
        )
        self.spelling = Spelling(
            tokenizer=loaded.tokenizer,
            stop_tokens=frozenset((loaded.tokenizer.eod, *(wishes.stop_tokens or ()))),
            stop_strings=tuple(wishes.stop_strings or ()),
        )
        self._asked = 0

    def request(self, text: str) -> Request:
        """Return the request to continue `text`; an empty one is the beginning of a document."""
        self._asked += 1
        return Request(
            prompt=tuple(self.tokenizer.encode(text)) or (self.tokenizer.eod,),
            max_new_tokens=self.wishes.out_seq_length,
            sampling=self.sampling,
            seed=f"{self.seed}:{self._asked}",
            stop_tokens=self.spelling.stop_tokens,
            stop_strings=self.spelling.stop_strings,
            logprobs=self.wishes.logprobs,
            prompt_logprobs=self.wishes.logprobs and not self.engine.stage.sees_prefix,
        )

    def continued(self, texts: Iterable[str]) -> Iterator[Completion]:
        """Return what follows each text, in their order, as it is found.

        Raises:
            ConfigError: lists every text that is too long; nothing has been done then.
        """
        requests = [self.request(text) for text in texts]
        raise_if_any(
            f"prompt {number}: {problem}"
            for number, request in enumerate(requests, start=1)
            for problem in self.engine.problems(request)
        )
        width = self.wishes.beam_width
        if width is None:
            return self.engine.complete(requests)
        return (self._likeliest(request, width) for request in requests)

    def parts(self, text: str) -> Iterator[str]:
        """Yield what follows `text`, in parts as soon as they are certain.

        Raises:
            ConfigError: the text is too long.
        """
        request = self.request(text)
        if self.wishes.beam_width is not None:
            yield self.text(self._likeliest(request, self.wishes.beam_width))
            return
        self.engine.add(request)
        parts = Parts(self.spelling, request.prompt)
        while self.engine.is_busy:
            for event in self.engine.step():
                token = event.choice.token if event.choice else None
                yield parts.after(token, is_last=event.reason is not None)

    def text(self, done: Completion) -> str:
        """Return the text of a continuation, without what it stopped at."""
        return self.spelling.text(done.prompt, done.tokens)

    def sample(self, done: Completion) -> dict[str, Any]:
        """Return a continuation as a JSON object."""
        record: dict[str, Any] = {
            "text": self.text(done),
            "length": len(done.tokens),
            "finished": done.reason == "stop",
        }
        if self.wishes.logprobs:
            record["prompt_tokens"] = list(done.prompt)
            record["prompt_logprobs"] = done.prompt_logprobs
            record["tokens"] = list(done.tokens)
            record["logprobs"] = [choice.logprob for choice in done.choices]
        return record

    def _likeliest(self, request: Request, width: int) -> Completion:
        best, *_ = self.engine.search(
            Search(
                prompt=request.prompt,
                width=width,
                max_new_tokens=request.max_new_tokens,
                stop_tokens=request.stop_tokens,
                length_penalty=self.wishes.length_penalty,
            )
        )
        ended = best.tokens[-1] in request.stop_tokens
        return Completion(
            prompt=request.prompt,
            tokens=best.tokens,
            reason="stop" if ended else "length",
            choices=(),
        )
