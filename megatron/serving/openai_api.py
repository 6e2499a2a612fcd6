"""POST /v1/completions and GET /v1/models: the interface of OpenAI's completions."""

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from uuid import uuid4

from megatron.errors import ConfigError
from megatron.generation.request import Choice, Completion, Request
from megatron.generation.sampling import Sampling
from megatron.serving.engine_loop import Unavailable
from megatron.serving.fields import CompletionBody
from megatron.serving.in_flight import InFlight
from megatron.serving.served_model import ServedModel
from megatron.serving.spelling import Parts, Spelling, texts_of_each
from megatron.tokenizer.continuation import text_after

Record = dict[str, Any]

_USUAL_NEW_TOKENS = 16


class UnknownModel(Exception):
    """Another model is asked for than the one that is served."""


def error_record(message: str, *, status: int) -> Record:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = {401: "invalid_api_key", 404: "model_not_found"}.get(status)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models(served: ServedModel, *, started_at: float) -> Record:
    """Return the list of the one model."""
    model = {"id": served.name, "object": "model", "created": int(started_at), "owned_by": ""}
    return {"object": "list", "data": [model]}


class Completing:
    """One request of POST /v1/completions: what it asks the engine, and what it tells of that.

    Raises:
        ConfigError, DataError: it asks for what cannot be done.
        UnknownModel: another model is asked for.
    """

    def __init__(self, served: ServedModel, body: CompletionBody):
        if body.model != served.name:
            raise UnknownModel(f"there is no model {body.model!r} here but {served.name!r}")
        self.served, self.body = served, body
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self.spelling = Spelling(
            tokenizer=served.tokenizer,
            stop_tokens=frozenset({served.tokenizer.eod}),
            stop_strings=tuple(stops),
        )
        self.asked = [one for one in self._asked_once() for _ in range(body.n)]
        prompts = [prompt for _, prompt in self.asked]
        new_tokens = served.new_tokens(prompts, body.max_tokens, _USUAL_NEW_TOKENS)
        served.require_room(prompts[:: body.n], new_tokens, body.n)
        wants = body.logprobs is not None
        top_p = body.top_p if body.top_p < 1 else 0.0
        sampling = Sampling(temperature=body.temperature, top_p=top_p)
        self.requests = [
            Request(
                prompt=prompt,
                max_new_tokens=new_tokens,
                sampling=sampling,
                seed=seed,
                stop_tokens=self.spelling.stop_tokens,
                stop_strings=self.spelling.stop_strings,
                logprobs=wants,
                prompt_logprobs=wants and body.echo,
                top_logprobs=body.logprobs or 0,
            )
            for prompt, seed in zip(prompts, served.seeds(body.seed, len(prompts)), strict=True)
        ]
        served.require_possible(self.requests)
        self._base: Record = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.name,
        }

    def _asked_once(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return text and tokens of each prompt; an empty one is the beginning of a document."""
        tokenizer = self.served.tokenizer
        prompt: Any = self.body.prompt
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        return [
            (one, tuple(tokenizer.encode(one)) or (tokenizer.eod,))
            if isinstance(one, str)
            else (self._spelled_if_known(one), tuple(one))
            for one in ([prompt] if is_one else prompt)
        ]

    def _spelled_if_known(self, tokens: Any) -> str:
        if not all(0 <= token < self.served.vocab_size for token in tokens):
            raise ConfigError(
                f"prompt: a token is not in the vocabulary of {self.served.vocab_size}"
            )
        return self.served.tokenizer.decode(tokens) if self.body.echo else ""

    async def answer(self) -> Record:
        """Return the object that answers at once.

        Raises:
            Unavailable: nothing more can be taken on now.
        """
        with InFlight(self.served.engine_loop, self.requests) as jobs:
            done = await jobs.completions()
        choices = [
            {
                "index": index,
                "text": self._echo(index) + self.spelling.text(one.prompt, one.tokens),
                "logprobs": self._logprobs(index, one),
                "finish_reason": one.reason,
            }
            for index, one in enumerate(done)
        ]
        return {
            **self._base,
            "choices": choices,
            "usage": self._usage(sum(len(one.tokens) for one in done)),
        }

    async def stream(self, jobs: InFlight) -> AsyncIterator[str]:
        """Yield the lines of the answer as server-sent events."""
        parts = [Parts(self.spelling, request.prompt) for request in self.requests]
        last = [request.prompt[-1:] for request in self.requests]
        begun = [False] * len(parts)
        offsets = [0] * len(parts)
        num_new = 0
        options = self.body.stream_options
        try:
            async for index, event in jobs.events():
                num_new += event.choice is not None
                token = event.choice.token if event.choice else None
                text = parts[index].after(token, is_last=event.reason is not None)
                told: Record | None = None
                if self.body.logprobs is not None:
                    told = self._part_logprobs(
                        index if not begun[index] else None,
                        event.prompt_logprobs,
                        [event.choice] if event.choice else [],
                        last[index],
                        offsets[index],
                    )
                    offsets[index] += sum(map(len, told["tokens"]))
                    last[index] = (token,) if token is not None else ()
                if not begun[index]:
                    text, begun[index] = self._echo(index) + text, True
                yield self._line(index, text, told, event.reason)
        except Unavailable as error:
            yield _event(error_record(str(error), status=503))
            return
        if options and options.include_usage:
            yield _event({**self._base, "choices": [], "usage": self._usage(num_new)})
        yield "data: [DONE]\n\n"

    def _line(self, index: int, text: str, logprobs: Record | None, reason: str | None) -> str:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return _event({**self._base, "choices": [choice]})

    def _echo(self, index: int) -> str:
        return self.asked[index][0] if self.body.echo else ""

    def _usage(self, new: int) -> Record:
        read = sum(len(request.prompt) for request in self.requests[:: self.body.n])
        return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}

    def _logprobs(self, index: int, done: Completion) -> Record | None:
        if self.body.logprobs is None:
            return None
        return self._part_logprobs(index, done.prompt_logprobs, done.choices, done.prompt[-1:], 0)

    def _part_logprobs(
        self,
        index: int | None,
        of_prompt: Sequence[float],
        choices: Sequence[Choice],
        last: Sequence[int],
        offset: int,
    ) -> Record:
        """Return OpenAI's record of probabilities: of a prompt, if it is its turn, and of tokens.

        Args:
            last: the token in front of the first of `choices`.
        """
        tokenizer = self.served.tokenizer
        before = self.requests[index].prompt if index is not None and self.body.echo else ()
        shown = [choice for choice in choices if choice.token not in self.spelling.stop_tokens]
        new = [choice.token for choice in shown]
        earlier = [last, *([token] for token in new)]
        tokens = [*texts_of_each(tokenizer, before), *texts_of_each(tokenizer, new, last)]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        first = [None] if before else []
        return {
            "tokens": tokens,
            "token_logprobs": [*first, *of_prompt, *(choice.logprob for choice in shown)],
            "top_logprobs": [
                *(None for _ in before),
                *map(self._likeliest, shown, earlier),
            ],
            "text_offset": offsets,
        }

    def _likeliest(self, choice: Choice, last: Sequence[int]) -> dict[str, float]:
        found: dict[str, float] = {}
        for token, value in choice.top:
            # Parts of characters are spelled alike; the likeliest of them is told.
            found.setdefault(text_after(self.served.tokenizer, last, [token]), value)
        return found


def _event(record: Record) -> str:
    return f"data: {json.dumps(record)}\n\n"
