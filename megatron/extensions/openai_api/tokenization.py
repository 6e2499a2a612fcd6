"""POST /tokenize and POST /detokenize: tokens of a text or a conversation, and their text.

Source: vLLM's server.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, FailFast, Field

from megatron.common.errors import ConfigError
from megatron.extensions.openai_api.completions import require_template
from megatron.extensions.openai_api.errors import openai_responses
from megatron.extensions.openai_api.request import Record, require_model, require_vocabulary
from megatron.extensions.openai_api.schemas import Messages
from megatron.inference.loading.detokenizer import texts_of_each
from megatron.inference.server.schemas import Answer, Body, Text, only
from megatron.inference.server.served_model import ServedModel
from megatron.tokenizer.special import encode_alone


class TokenizeBody(Body):
    """The fields of POST /tokenize: a text, or messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {mine: {"type": kind}, other: {"type": "null"}}, "required": [mine]}
                for mine, kind, other in (
                    ("prompt", "string", "messages"),
                    ("messages", "array", "prompt"),
                )
            ]
        }
    )

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: Annotated[
        Literal[True], only(True, "conversations end where the answer begins")
    ] = True
    return_token_strs: bool = False


class TokenizeAnswer(Answer):
    """The answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """The fields of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]


class DetokenizeAnswer(Answer):
    """The answer of POST /detokenize."""

    prompt: str


def add_tokenization(app: FastAPI, served: ServedModel) -> None:
    """Add the routes of tokenization."""

    def responses(answer: type[Answer]) -> Any:
        return openai_responses(answer, has_body=True, streams=False)

    @app.post("/tokenize", responses=responses(TokenizeAnswer))
    async def tokenize(body: TokenizeBody) -> JSONResponse:
        return JSONResponse(await served.in_thread(_tokenize, served, body))

    @app.post("/detokenize", responses=responses(DetokenizeAnswer))
    async def detokenize(body: DetokenizeBody) -> JSONResponse:
        return JSONResponse(await served.in_thread(_detokenize, served, body))


def _tokenize(served: ServedModel, body: TokenizeBody) -> Record:
    _require_this_model(served, body.model)
    tokens = _encode(served, body)
    most = served.limits.request_tokens
    if body.return_token_strs and len(tokens) > most:
        raise ConfigError(f"return_token_strs: {len(tokens)} tokens are more than {most}")
    return {
        "count": len(tokens),
        "max_model_len": served.engine_thread.engine.max_length,
        "tokens": [*tokens],
        "token_strs": texts_of_each(served.tokenizer, tokens) if body.return_token_strs else None,
    }


def _encode(served: ServedModel, body: TokenizeBody) -> Sequence[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ConfigError("give prompt, a text, or messages, a conversation")
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        encode = served.tokenizer.encode if adds else encode_alone(served.tokenizer)
        return encode(body.prompt)
    if body.add_special_tokens:
        raise ConfigError("add_special_tokens: the chat template writes those of a conversation")
    messages = [message.for_template() for message in body.messages or ()]
    return require_template(served).encode(messages)


def _detokenize(served: ServedModel, body: DetokenizeBody) -> Record:
    _require_this_model(served, body.model)
    require_vocabulary(body.tokens, served.vocab_size, field="tokens")
    return {"prompt": served.tokenizer.decode(body.tokens)}


def _require_this_model(served: ServedModel, name: str | None) -> None:
    if name is not None:
        require_model(served, name)
