"""Request and response bodies of POST /v1/completions and POST /v1/chat/completions (pydantic).

Source: OpenAI's API reference; further fields follow vLLM's server.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from megatron.inference.server.schemas import (
    SEED_LIMIT,
    Answer,
    Body,
    Text,
    at_most,
    only,
    refuse_field,
    require_characters,
)

_FinishReason = Literal["stop", "length"]
_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_BIASES = 1024
_MOST_STOP_TOKENS = 1024
_MOST_METADATA = 16
_MOST_MESSAGES = 2048
_NO_TOOLS = refuse_field("this server calls no tools")
_TEXT_ALONE = "this server reads and writes text alone"


def _stop(stop: Any) -> Any:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("give a text or a list of texts")
    if len(texts) > _MOST_STOPS or not all(0 < len(text) <= _LONGEST_STOP for text in texts):
        raise ValueError(
            f"give at most {_MOST_STOPS} texts, of 1 to {_LONGEST_STOP} characters each"
        )
    return [require_characters(text) for text in texts]


def _prompt(prompt: Any) -> Any:
    parts = prompt if isinstance(prompt, list) else [prompt]
    if all(isinstance(part, str) for part in parts) and parts:
        for text in parts:
            require_characters(text)
        return prompt
    lists = parts if all(isinstance(part, list) for part in parts) else [prompt]
    if not parts or not all(isinstance(one, list) and all(map(_is_token, one)) for one in lists):
        raise ValueError("give a text, a list of texts, a list of tokens or lists of tokens")
    if not all(lists):
        raise ValueError("a list of tokens is empty: it needs at least 1")
    return prompt


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


_StopText = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
_Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Stop = Annotated[
    _StopText | Annotated[list[_StopText], Field(max_length=_MOST_STOPS)], BeforeValidator(_stop)
]
Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1)]
    | _Tokens
    | Annotated[list[_Tokens], Field(min_length=1)],
    BeforeValidator(_prompt),
]
_TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class OpenAIBody(Body):
    """The common fields of completions and chat completions."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: Annotated[
        dict[_TokenKey, Annotated[float, Field(ge=-100, le=100)]], at_most(_MOST_BIASES)
    ] = Field({}, max_length=_MOST_BIASES)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-1, lt=SEED_LIMIT)
    stop: Stop | None = None
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0)]], FailFast(), at_most(_MOST_STOP_TOKENS)
    ] = Field([], max_length=_MOST_STOP_TOKENS)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    # For the client's records.
    user: Text | None = None
    metadata: (
        Annotated[dict[str, str], Field(max_length=_MOST_METADATA), at_most(_MOST_METADATA)] | None
    ) = None


class CompletionBody(OpenAIBody):
    """The fields of POST /v1/completions."""

    prompt: Prompt
    suffix: Text | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=128)
    add_special_tokens: bool = True
    prompt_logprobs: Annotated[
        None, refuse_field("log-probabilities of the prompt come with echo and logprobs")
    ] = None
    response_format: Annotated[
        None, refuse_field("this server does not constrain the format of answers")
    ] = None


class TextPart(Body):
    """A part of a message's content."""

    type: Annotated[Literal["text"], only("text", _TEXT_ALONE)]
    text: Text


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return require_characters(content)
    if not isinstance(content, list):
        raise ValueError("give a text or a list of parts of the type text")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"there is a part of the type {kind[:40]!r}, and {_TEXT_ALONE}")
        if not isinstance(part, dict) or set(part) != {"type", "text"} or kind != "text":
            raise ValueError('a part of a message is {"type": "text", "text": "…"}')
        if not isinstance(part["text"], str):
            raise ValueError("the text of a part must be a string")
        require_characters(part["text"])
    return content


def _role(role: Any) -> Any:
    if role in ("tool", "function"):
        raise ValueError("this server calls no tools, so that no message has their results")
    return role


class ChatMessage(Body):
    """A message of a conversation."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_role)]
    content: Annotated[str | list[TextPart], BeforeValidator(_content)]
    name: Text | None = None
    refusal: Annotated[None, refuse_field("this server has no refusals")] = None
    audio: Annotated[None, refuse_field(_TEXT_ALONE)] = None
    tool_calls: Annotated[None, _NO_TOOLS] = None
    tool_call_id: Annotated[None, _NO_TOOLS] = None
    function_call: Annotated[None, _NO_TOOLS] = None

    @property
    def text(self) -> str:
        """The content, whose parts are joined."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, str]:
        """Return the message as a dictionary for chat templates."""
        named = {"name": self.name} if self.name is not None else {}
        return {"role": self.role, "content": self.text, **named}


def _conversation(messages: Any) -> Any:
    if isinstance(messages, list):
        contents = [one.get("content") for one in messages if isinstance(one, dict)]
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if len(messages) + parts > _MOST_MESSAGES:
            raise ValueError(
                f"give at most {_MOST_MESSAGES} messages and parts of them, not "
                f"{len(messages) + parts}"
            )
    return messages


class TextFormat(Body):
    """The only supported response_format."""

    type: Literal["text"]


Messages = Annotated[
    list[ChatMessage],
    BeforeValidator(_conversation),
    Field(min_length=1, max_length=_MOST_MESSAGES),
]
"""A conversation, where it may be left out."""


class ChatBody(OpenAIBody):
    """The fields of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], FailFast(), BeforeValidator(_conversation)] = Field(
        min_length=1, max_length=_MOST_MESSAGES
    )
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    store: Annotated[Literal[False], only(False, "this server stores nothing")] = False
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    modalities: Annotated[list[Literal["text"]], only(["text"], _TEXT_ALONE)] | None = None
    response_format: (
        Annotated[
            TextFormat,
            only({"type": "text"}, "this server does not constrain the format of answers"),
        ]
        | None
    ) = None
    tools: Annotated[None, _NO_TOOLS] = None
    tool_choice: Annotated[Literal["none"], only("none", "this server calls no tools")] | None = (
        None
    )
    parallel_tool_calls: Annotated[None, _NO_TOOLS] = None
    functions: Annotated[None, _NO_TOOLS] = None
    function_call: Annotated[None, _NO_TOOLS] = None
    audio: Annotated[None, refuse_field(_TEXT_ALONE)] = None
    prediction: Annotated[None, refuse_field("this server takes no predicted outputs")] = None
    reasoning_effort: Annotated[None, refuse_field("this server has no reasoning models")] = None
    verbosity: Annotated[None, refuse_field("the model has no verbosity to choose")] = None
    web_search_options: Annotated[None, refuse_field("this server searches nothing")] = None


class ErrorDetails(Answer):
    """Details of an error."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: None
    code: str | None


class OpenAIError(Answer):
    """An error in OpenAI's format."""

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
    finish_reason: _FinishReason


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
    """A token, and the most likely tokens at its position."""

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
    finish_reason: _FinishReason


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
