"""What completions and chat completions have in common: requests, and how answers are put together."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar
from uuid import uuid4

from megatron.common.errors import ConfigError, raise_if_any
from megatron.inference.engine.request import Completion, Request
from megatron.inference.engine.sampling import Sampling
from megatron.inference.loading.incremental_detokenizer import Spelling
from megatron.inference.server.engine_thread import Unavailable
from megatron.inference.server.openai.choices import ChoiceWriter, Part, Prompt, TokenRecord
from megatron.inference.server.openai.records import Record, error_record, event_line, require_model
from megatron.inference.server.openai.request_schemas import OpenAIBody
from megatron.inference.server.pending_requests import InFlight
from megatron.inference.server.served_model import ServedModel
from megatron.tokenizer.special import special_tokens


class OpenAIRequest(ABC):
    """One HTTP request: what the engine gets, and the records made of what it generates.

    Args:
        prompts: each is continued `copies` times, of which `n` continuations are returned.
        stops: stop tokens and strings besides those of the body and the end of a document.

    Raises:
        ConfigError: lists what cannot be done.
        UnknownModel: another model is requested.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]
    records_stop_token: ClassVar[bool]

    def __init__(
        self,
        served: ServedModel,
        body: OpenAIBody,
        prompts: Sequence[Prompt],
        *,
        new_tokens: int,
        copies: int | None = None,
        logprobs: int | None = None,
        echo: bool = False,
        stop_tokens: frozenset[int] = frozenset(),
        stop_strings: tuple[str, ...] = (),
    ):
        require_model(served, body.model)
        self.served, self.body, self.prompts = served, body, prompts
        self.copies = copies or body.n
        self.logprobs, self.echo = logprobs, echo
        served.require_room([prompt.tokens for prompt in prompts], new_tokens, self.copies)
        self.spelling = _spelling(served, body, stop_tokens, stop_strings)
        self.requests = self._requests(new_tokens)
        served.require_possible(self.requests)
        self._base: Record = {
            "id": f"{self.id_prefix}-{uuid4().hex}",
            "object": self.chunk_name if body.stream else self.object_name,
            "created": int(time.time()),
            "model": served.name,
        }

    @abstractmethod
    def choice(self, index: int, part: Part) -> Record:
        """Return a whole choice of an answer."""

    @abstractmethod
    def chunks(self, index: int, part: Part, *, is_first: bool) -> Iterator[Record]:
        """Yield the choices of a stream's events that bring `part`."""

    async def answer(self) -> Record:
        """Return the object that answers at once.

        Raises:
            Unavailable: no more requests can be taken.
        """
        with InFlight(self.served.engine_loop, self.requests) as jobs:
            done = await jobs.completions()
        choices = [
            self.choice(place, self._writer(index).whole(done[index]))
            for place, index in enumerate(self._best(done))
        ]
        usage = self._usage(sum(len(one.tokens) for one in done))
        return {**self._base, "choices": choices, "usage": usage}

    async def stream(self, jobs: InFlight) -> AsyncIterator[str]:
        """Yield the lines of the answer as server-sent events."""
        options = self.body.stream_options
        has_usage = bool(options and options.include_usage)
        base = {**self._base, "usage": None} if has_usage else self._base
        is_obfuscated = bool(options and options.include_obfuscation)
        writers = [self._writer(index) for index in range(len(self.requests))]
        begun: set[int] = set()
        num_new = 0
        try:
            async for index, event in jobs.events():
                num_new += event.choice is not None
                part = writers[index].after(event)
                for choice in self.chunks(index, part, is_first=index not in begun):
                    length = len(part.text) if is_obfuscated else None
                    yield event_line({**base, "choices": [choice]}, obfuscated=length)
                begun.add(index)
        except Unavailable as error:
            yield event_line(error_record(str(error), status=503))
            return
        if has_usage:
            yield event_line({**self._base, "choices": [], "usage": self._usage(num_new)})
        yield "data: [DONE]\n\n"

    def token_text(self, token: int, text: str) -> str:
        """Return what stands for a token in lists of log-probabilities."""
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else text

    def likeliest(self, record: TokenRecord) -> list[tuple[str, float]]:
        """Return text and log-probability of the likeliest tokens, and of the token itself.

        A text that a likelier token has already stands as token_id:ID.
        """
        found: dict[str, float] = {}
        for token, text, value in record.likeliest(self.served.tokenizer):
            name = self.token_text(token, text)
            found[f"token_id:{token}" if name in found else name] = value
        return [*found.items()]

    def _requests(self, new_tokens: int) -> list[Request]:
        body, served = self.body, self.served
        raise_if_any(_problems(body, new_tokens, served.vocab_size))
        one = Request(
            prompt=(),
            max_new_tokens=new_tokens,
            min_new_tokens=body.min_tokens,
            sampling=_sampling(body, served.vocab_size),
            stop_tokens=self.spelling.stop_tokens,
            stop_strings=self.spelling.stop_strings,
            # The best of several are those with the highest log-probability.
            logprobs=self.logprobs is not None or self.copies > body.n,
            prompt_logprobs=self.logprobs is not None and self.echo,
            top_logprobs=self.logprobs or 0,
        )
        prompts = [prompt.tokens for prompt in self.prompts for _ in range(self.copies)]
        seed = None if body.seed == -1 else body.seed
        seeds = served.seeds(seed, len(prompts))
        return [
            replace(one, prompt=prompt, seed=own)
            for prompt, own in zip(prompts, seeds, strict=True)
        ]

    def _writer(self, index: int) -> ChoiceWriter:
        return ChoiceWriter(
            self.spelling,
            self.prompts[index // self.copies],
            echo=self.echo,
            with_tokens=self.logprobs is not None,
            with_stop_token=self.records_stop_token,
        )

    def _best(self, done: Sequence[Completion]) -> Iterator[int]:
        """Yield the places of the continuations to return: the likeliest per token of each prompt."""
        for first in range(0, len(done), self.copies):
            places = [*range(first, first + self.copies)]
            if self.copies > self.body.n:
                places.sort(key=lambda place: -_mean_logprob(done[place]))
            yield from places[: self.body.n]

    def _usage(self, new: int) -> Record:
        read = sum(len(prompt.tokens) for prompt in self.prompts)
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def _mean_logprob(done: Completion) -> float:
    values = [choice.logprob or 0.0 for choice in done.choices]
    return sum(values) / max(1, len(values))


def _problems(body: OpenAIBody, new_tokens: int, vocab_size: int) -> Iterator[str]:
    if body.min_tokens > new_tokens:
        yield f"min_tokens: {body.min_tokens} is more than the {new_tokens} tokens to generate"
    for name, tokens in (
        ("stop_token_ids", body.stop_token_ids),
        ("logit_bias", map(int, body.logit_bias)),
    ):
        if outside := [token for token in tokens if token >= vocab_size]:
            yield f"{name}: {outside[0]} is not in the vocabulary of {vocab_size}"


def _sampling(body: OpenAIBody, vocab_size: int) -> Sampling:
    return Sampling(
        temperature=body.temperature,
        top_k=body.top_k if 0 < body.top_k < vocab_size else 0,
        top_p=body.top_p if body.top_p < 1 else 0.0,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in body.logit_bias.items()),
    )


def _spelling(
    served: ServedModel,
    body: OpenAIBody,
    stop_tokens: frozenset[int],
    stop_strings: tuple[str, ...],
) -> Spelling:
    tokenizer = served.tokenizer
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    ends = frozenset() if body.ignore_eos else frozenset({tokenizer.eod}) | stop_tokens
    return Spelling(
        tokenizer=tokenizer,
        stop_tokens=ends | frozenset(body.stop_token_ids),
        stop_strings=(*stops, *(() if body.ignore_eos else stop_strings)),
        hidden_tokens=special_tokens(tokenizer) if body.skip_special_tokens else frozenset(),
        min_tokens=body.min_tokens,
    )


def require_vocabulary(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ConfigError if the prompt has a token that the model does not have."""
    if not all(token < vocab_size for token in tokens):
        raise ConfigError(f"prompt: a token is not in the vocabulary of {vocab_size}")
