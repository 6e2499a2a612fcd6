"""Base of completions and chat completions: engine requests, responses, and server-sent events."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from uuid import uuid4

from megatron.common.errors import ConfigError, raise_if_any
from megatron.extensions.openai_api.choices import ChoiceBuilder, Delta, Prompt, TokenRecord
from megatron.extensions.openai_api.errors import openai_error
from megatron.extensions.openai_api.schemas import OpenAIBody
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.loading.detokenizer import Detokenizer
from megatron.inference.server.engine_thread import PendingRequests, Unavailable
from megatron.inference.server.errors import UnknownModel
from megatron.inference.server.served_model import ServedModel
from megatron.tokenizer.special import special_tokens

Record = dict[str, Any]

_OBFUSCATED = 32
"""Characters of text and obfuscation of an event together, if the text is not longer."""


def require_model(served: ServedModel, name: str) -> None:
    """Raise UnknownModel unless the served model has this name."""
    if name != served.name:
        raise UnknownModel(f"there is no model {name!r} here but {served.name!r}")


def model_record(served: ServedModel, *, started_at: float) -> Record:
    """Return the model as GET /v1/models/{model} does."""
    created = int(started_at)
    return {"id": served.name, "object": "model", "created": created, "owned_by": "megatron"}


def event_line(record: Record, *, obfuscated: int | None = None) -> str:
    """Return a server-sent event.

    Args:
        obfuscated: length of the text, hidden by a field of random characters; None: no field.
    """
    if obfuscated is not None:
        padding = secrets.token_hex(_OBFUSCATED)[: max(0, _OBFUSCATED - obfuscated)]
        record = {**record, "obfuscation": padding}
    return f"data: {json.dumps(record)}\n\n"


class OpenAIRequest(ABC):
    """One HTTP request: its engine requests, and the response built from their completions.

    Args:
        prompts: each gets `copies` continuations, of which the `n` best are returned.
        stop_tokens: in addition to the body's and EOD.
        stop_strings: in addition to the body's.

    Raises:
        ConfigError: lists all problems of the fields.
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
        self.detokenizer = _detokenizer(served, body, stop_tokens, stop_strings)
        self.requests = self._requests(new_tokens)
        served.require_possible(self.requests)
        self._base: Record = {
            "id": f"{self.id_prefix}-{uuid4().hex}",
            "object": self.chunk_name if body.stream else self.object_name,
            "created": int(time.time()),
            "model": served.name,
        }

    @abstractmethod
    def choice(self, index: int, delta: Delta) -> Record:
        """Return a choice of a response that is not streamed."""

    @abstractmethod
    def chunks(self, index: int, delta: Delta, *, is_first: bool) -> Iterator[Record]:
        """Yield the choices of the stream's events for `delta`."""

    async def answer(self) -> Record:
        """Generate, and return the response.

        Raises:
            Unavailable: the queue is full, or the server is shutting down.
        """
        with PendingRequests(self.served.engine_thread, self.requests) as pending:
            done = await pending.completions()
        return await self.served.in_thread(self._response, done)

    async def stream(self, pending: PendingRequests) -> AsyncIterator[str]:
        """Yield the response as server-sent events."""
        options = self.body.stream_options
        has_usage = bool(options and options.include_usage)
        base = {**self._base, "usage": None} if has_usage else self._base
        is_obfuscated = bool(options and options.include_obfuscation)
        builders = [self._builder(index) for index in range(len(self.requests))]
        begun: set[int] = set()
        num_new = 0
        try:
            async for index, event in pending.events():
                num_new += event.new_token is not None
                delta = builders[index].add(event)
                for choice in self.chunks(index, delta, is_first=index not in begun):
                    length = len(delta.text) if is_obfuscated else None
                    yield event_line({**base, "choices": [choice]}, obfuscated=length)
                begun.add(index)
        except Unavailable as error:
            yield event_line(openai_error(str(error), status=503))
            return
        if has_usage:
            yield event_line({**self._base, "choices": [], "usage": self._usage(num_new)})
        yield "data: [DONE]\n\n"

    def _response(self, done: Sequence[Completion]) -> Record:
        choices = [
            self.choice(number, self._builder(index).complete(done[index]))
            for number, index in enumerate(self._best(done))
        ]
        usage = self._usage(sum(len(one.tokens) for one in done))
        return {**self._base, "choices": choices, "usage": usage}

    def token_text(self, token: int, text: str) -> str:
        """Return the name of a token in lists of log-probabilities."""
        return f"token_id:{token}" if self.body.return_tokens_as_token_ids else text

    def top_logprobs(self, record: TokenRecord) -> list[tuple[str, float]]:
        """Return text and log-probability of the most likely tokens, and of the token itself.

        A token with the same text as a more likely one is named token_id:ID.
        """
        found: dict[str, float] = {}
        for token, text, value in record.top(self.served.tokenizer):
            name = self.token_text(token, text)
            found[f"token_id:{token}" if name in found else name] = value
        return [*found.items()]

    def _requests(self, new_tokens: int) -> list[Request]:
        body, served = self.body, self.served
        raise_if_any(_problems(body, new_tokens, served.vocab_size))
        common = Request(
            prompt=(),
            max_new_tokens=new_tokens,
            min_new_tokens=body.min_tokens,
            sampling=_sampling(body, served.vocab_size),
            stop_tokens=self.detokenizer.stop_tokens,
            stop_strings=self.detokenizer.stop_strings,
            # The best of several are those with the highest log-probability.
            logprobs=self.logprobs is not None or self.copies > body.n,
            prompt_logprobs=self.logprobs is not None and self.echo,
            top_logprobs=self.logprobs or 0,
        )
        prompts = [prompt.tokens for prompt in self.prompts for _ in range(self.copies)]
        seed = None if body.seed == -1 else body.seed
        seeds = served.seeds(seed, len(prompts))
        return [
            replace(common, prompt=prompt, seed=sequence_seed)
            for prompt, sequence_seed in zip(prompts, seeds, strict=True)
        ]

    def _builder(self, index: int) -> ChoiceBuilder:
        return ChoiceBuilder(
            self.detokenizer,
            self.prompts[index // self.copies],
            echo=self.echo,
            with_tokens=self.logprobs is not None,
            with_stop_token=self.records_stop_token,
        )

    def _best(self, done: Sequence[Completion]) -> Iterator[int]:
        """Yield the indices of the returned completions: those with the highest mean logprob."""
        for first in range(0, len(done), self.copies):
            indices = [*range(first, first + self.copies)]
            if self.copies > self.body.n:
                indices.sort(key=lambda index: -_mean_logprob(done[index]))
            yield from indices[: self.body.n]

    def _usage(self, new: int) -> Record:
        num_prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        total = num_prompt + new
        return {"prompt_tokens": num_prompt, "completion_tokens": new, "total_tokens": total}


def _mean_logprob(done: Completion) -> float:
    values = [one.logprob or 0.0 for one in done.new_tokens]
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


def _sampling(body: OpenAIBody, vocab_size: int) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k if 0 < body.top_k < vocab_size else 0,
        top_p=body.top_p if body.top_p < 1 else 0.0,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in body.logit_bias.items()),
    )


def _detokenizer(
    served: ServedModel,
    body: OpenAIBody,
    stop_tokens: frozenset[int],
    stop_strings: tuple[str, ...],
) -> Detokenizer:
    tokenizer = served.tokenizer
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    ends = frozenset() if body.ignore_eos else frozenset({tokenizer.eod}) | stop_tokens
    return Detokenizer(
        tokenizer=tokenizer,
        stop_tokens=ends | frozenset(body.stop_token_ids),
        stop_strings=(*stops, *(() if body.ignore_eos else stop_strings)),
        hidden_tokens=special_tokens(tokenizer) if body.skip_special_tokens else frozenset(),
        min_tokens=body.min_tokens,
    )


def require_vocabulary(tokens: Sequence[int], vocab_size: int, *, field: str = "prompt") -> None:
    """Raise ConfigError if a token of a field is not in the vocabulary."""
    if not all(token < vocab_size for token in tokens):
        raise ConfigError(f"{field}: a token is not in the vocabulary of {vocab_size}")
