"""POST /v1/completions and POST /v1/chat/completions: OpenAI's completions and chat completions."""

import time
from collections.abc import Iterator, Sequence

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from megatron.common.errors import ConfigError, raise_if_any
from megatron.extensions.openai_api.choices import Delta, Prompt, TokenRecord
from megatron.extensions.openai_api.errors import openai_responses
from megatron.extensions.openai_api.request import (
    OpenAIRequest,
    Record,
    model_record,
    require_model,
    require_vocabulary,
)
from megatron.extensions.openai_api.schemas import (
    ChatAnswer,
    ChatBody,
    CompletionAnswer,
    CompletionBody,
    ModelAnswer,
    ModelsAnswer,
)
from megatron.inference.server.engine_thread import PendingRequests, while_connected
from megatron.inference.server.served_model import ServedModel
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.special import encode_alone

_USUAL_NEW_TOKENS = 16
_INCOMPLETE = "\ufffd"
"""Decoded text of a part of a character."""


def add_openai_api(app: FastAPI, served: ServedModel) -> None:
    """Add the routes of completions, chat completions and models."""
    started_at = time.time()

    async def answer(request: OpenAIRequest, http: HTTPRequest) -> Response:
        if request.body.stream:
            return _Stream(PendingRequests(served.engine_thread, request.requests), request)
        return JSONResponse(await while_connected(http, request.answer))

    @app.post("/v1/completions", responses=openai_responses(CompletionAnswer, has_body=True))
    async def completions(body: CompletionBody, http: HTTPRequest) -> Response:
        return await answer(await served.in_thread(CompletionRequest, served, body), http)

    @app.post("/v1/chat/completions", responses=openai_responses(ChatAnswer, has_body=True))
    async def chat_completions(body: ChatBody, http: HTTPRequest) -> Response:
        return await answer(await served.in_thread(ChatRequest, served, body), http)

    listed = openai_responses(ModelsAnswer, has_body=False, names_model=False)

    @app.get("/v1/models", responses=listed)
    async def models() -> JSONResponse:
        data = [model_record(served, started_at=started_at)]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{model:path}", responses=openai_responses(ModelAnswer, has_body=False))
    async def model(model: str) -> JSONResponse:
        require_model(served, model)
        return JSONResponse(model_record(served, started_at=started_at))


class _Stream(StreamingResponse):
    """A streamed response; its requests are cancelled when the client disconnects."""

    def __init__(self, pending: PendingRequests, request: OpenAIRequest):
        super().__init__(request.stream(pending), media_type="text/event-stream")
        self._pending = pending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._pending:
            await super().__call__(scope, receive, send)


class CompletionRequest(OpenAIRequest):
    """One request of POST /v1/completions.

    Raises:
        ConfigError, DataError: lists all problems of the fields.
        UnknownModel: another model is requested.
    """

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"
    records_stop_token = True

    def __init__(self, served: ServedModel, body: CompletionBody):
        raise_if_any(_completion_problems(served, body))
        prompts = [*_prompts(served, body)]
        tokens = [prompt.tokens for prompt in prompts]
        super().__init__(
            served,
            body,
            prompts,
            new_tokens=served.new_tokens(tokens, body.max_tokens, _USUAL_NEW_TOKENS),
            copies=max(body.n, body.best_of or 1),
            logprobs=body.logprobs,
            echo=body.echo,
        )

    def choice(self, index: int, delta: Delta) -> Record:
        """Return a choice of a response or of an event."""
        return {
            "index": index,
            "text": delta.text,
            "logprobs": None if self.logprobs is None else self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }

    def chunks(self, index: int, delta: Delta, *, is_first: bool) -> Iterator[Record]:
        """Yield the choice of an event, unless it is empty."""
        if delta.text or delta.tokens or delta.finish_reason:
            yield self.choice(index, delta)

    def _logprobs(self, records: Sequence[TokenRecord]) -> Record:
        return {
            "tokens": [self.token_text(one.scored.token, one.text) for one in records],
            "token_logprobs": [one.scored.logprob for one in records],
            "top_logprobs": [
                None if one.scored.logprob is None else dict(self.top_logprobs(one))
                for one in records
            ],
            "text_offset": [one.offset for one in records],
        }


def _completion_problems(served: ServedModel, body: CompletionBody) -> Iterator[str]:
    if body.best_of is not None and body.best_of < body.n:
        yield f"best_of: {body.best_of} is less than n, {body.n}"
    if body.best_of is not None and body.best_of > body.n and body.stream:
        yield "best_of: cannot be streamed, because the best are known only at the end"
    if not body.suffix:
        return
    if served.fim is None:
        yield "suffix: this model was not trained for fill-in-the-middle (--fim-rate); leave it out"
    if body.echo:
        yield "suffix: echo cannot repeat the text around a gap; leave one of them out"
    if not isinstance(body.prompt, str):
        yield "suffix: the prompt must be one text"


def _prompts(served: ServedModel, body: CompletionBody) -> Iterator[Prompt]:
    """Yield text and tokens of each prompt; an empty prompt begins a document."""
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    for prompt in [given] if is_one else given:
        if isinstance(prompt, str):
            tokens = _encode(served, body, prompt)
            yield Prompt(text=prompt, tokens=tokens or (served.tokenizer.eod,))
        elif isinstance(prompt, list):
            tokens = tuple(token for token in prompt if isinstance(token, int))
            require_vocabulary(tokens, served.vocab_size)
            # A prompt of tokens is decoded for echo alone: it can be long.
            yield Prompt(text=served.tokenizer.decode(tokens) if body.echo else "", tokens=tokens)


def _encode(served: ServedModel, body: CompletionBody, text: str) -> tuple[int, ...]:
    tokenizer = served.tokenizer
    if not body.suffix:
        encode = tokenizer.encode if body.add_special_tokens else encode_alone(tokenizer)
        return tuple(encode(text))
    if served.fim is None:
        raise ConfigError("suffix: this model was not trained for fill-in-the-middle")
    fim, encode = served.fim, tokenizer.encode  # as in training
    return (fim.prefix, *encode(text), fim.suffix, *encode(body.suffix), fim.middle)


class ChatRequest(OpenAIRequest):
    """One request of POST /v1/chat/completions.

    Raises:
        ConfigError, DataError: lists all problems of the fields.
        UnknownModel: another model is requested.
    """

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    records_stop_token = False

    def __init__(self, served: ServedModel, body: ChatBody):
        raise_if_any(_chat_problems(body))
        chat = require_template(served)
        tokens = tuple(chat.encode([message.for_template() for message in body.messages]))
        limit = (
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        )
        super().__init__(
            served,
            body,
            [Prompt(text="", tokens=tokens or (served.tokenizer.eod,))],
            new_tokens=served.new_tokens([tokens], limit, served.limits.new_tokens, body.n),
            logprobs=body.top_logprobs if body.logprobs else None,
            stop_tokens=chat.stop_tokens,
            stop_strings=chat.stop_strings,
        )

    def choice(self, index: int, delta: Delta) -> Record:
        """Return a choice of a response."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": index, "message": message, **self._common(delta)}

    def chunks(self, index: int, delta: Delta, *, is_first: bool) -> Iterator[Record]:
        """Yield the choices of events: first the role, then the text, last the finish reason."""
        empty = self._common(Delta(text=""))
        if is_first:
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, **empty}
        if delta.text or delta.tokens:
            common = self._common(Delta(text="", tokens=delta.tokens))
            yield {"index": index, "delta": {"content": delta.text}, **common}
        if delta.finish_reason:
            yield {"index": index, "delta": {}, **empty, "finish_reason": delta.finish_reason}

    def _common(self, delta: Delta) -> Record:
        content = [self._token(record) for record in delta.tokens]
        has_logprobs = self.logprobs is not None and (content or delta.finish_reason)
        return {
            "logprobs": {"content": content, "refusal": None} if has_logprobs else None,
            "finish_reason": delta.finish_reason,
        }

    def _token(self, record: TokenRecord) -> Record:
        top = self.top_logprobs(record) if self.logprobs else []
        token_text = self.token_text(record.scored.token, record.text)
        return {
            **_token_record(token_text, record.scored.logprob),
            "top_logprobs": [_token_record(text, logprob) for text, logprob in top],
        }


def _token_record(text: str, logprob: float | None) -> Record:
    # The bytes of a part of a character are unknown.
    in_bytes = None if _INCOMPLETE in text else [*text.encode()]
    return {"token": text, "logprob": logprob, "bytes": in_bytes}


def _chat_problems(body: ChatBody) -> Iterator[str]:
    if body.top_logprobs and not body.logprobs:
        yield "top_logprobs: needs logprobs: true"
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        yield "max_tokens and max_completion_tokens are the same limit: give one of them"


def require_template(served: ServedModel) -> ChatPrompts:
    """Return the encoder of conversations; raise ConfigError without a chat template."""
    if served.chat is None:
        raise ConfigError(
            "this model has no chat template: start the server with --chat-template FILE, or use "
            "POST /v1/completions"
        )
    return served.chat
