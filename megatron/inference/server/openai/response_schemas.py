"""The shapes of answers, as the OpenAPI document describes them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]


class Answer(BaseModel):
    """A JSON object that the server writes."""

    model_config = ConfigDict(extra="forbid")


class MegatronAnswer(Answer):
    """The answer of PUT /api: texts with their prompts, `scores` with beam_width alone."""

    text: list[str]
    segments: list[list[str]]
    logprobs: list[list[float]] | None = None
    scores: list[float] | None = None


class MegatronError(Answer):
    """Why a request is refused."""

    error: str


class ErrorDetails(Answer):
    """Why a request is refused."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: None
    code: str | None


class OpenAIError(Answer):
    """A refusal in OpenAI's shape."""

    error: ErrorDetails


class Usage(Answer):
    """Number of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Answer):
    """Log-probabilities of a text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """A continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionAnswer(Answer):
    """The answer of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatToken(Answer):
    """A token; `bytes` is null where it is a part of a character."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatTokenWithTop(ChatToken):
    """A token, and the likeliest ones at its position."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenWithTop]
    refusal: None


class ChatAnswerMessage(Answer):
    """A message of the model."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """An answer of the model."""

    index: int
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatAnswer(Answer):
    """The answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelAnswer(Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsAnswer(Answer):
    """The list of the one model."""

    object: Literal["list"]
    data: Annotated[list[ModelAnswer], Field(min_length=1, max_length=1)]


class HealthAnswer(Answer):
    """Whether requests are taken."""

    status: Literal["ok", "closing", "failed"]
