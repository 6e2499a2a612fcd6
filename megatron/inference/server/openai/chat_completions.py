"""POST /v1/chat/completions: OpenAI's interface to answer conversations."""

from collections.abc import Iterator
from typing import ClassVar

from megatron.common.errors import ConfigError, raise_if_any
from megatron.inference.server.openai.choices import Part, Prompt, TokenRecord
from megatron.inference.server.openai.records import Record
from megatron.inference.server.openai.request import OpenAIRequest
from megatron.inference.server.openai.request_schemas import ChatBody
from megatron.inference.server.served_model import ServedModel
from megatron.tokenizer.chat_prompt import ChatPrompts

_HALF = "\ufffd"


class ChatRequest(OpenAIRequest):
    """One request of POST /v1/chat/completions.

    Raises:
        ConfigError, DataError: lists what cannot be done.
        UnknownModel: another model is requested.
    """

    id_prefix: ClassVar[str] = "chatcmpl"
    object_name: ClassVar[str] = "chat.completion"
    chunk_name: ClassVar[str] = "chat.completion.chunk"
    records_stop_token: ClassVar[bool] = False

    def __init__(self, served: ServedModel, body: ChatBody):
        raise_if_any(_problems(body))
        chat = _require_template(served)
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

    def choice(self, index: int, part: Part) -> Record:
        """Return the choice of a whole answer."""
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(part)}

    def chunks(self, index: int, part: Part, *, is_first: bool) -> Iterator[Record]:
        """Yield choices of events: the role, then the text, then the end without text."""
        nothing = self._rest(Part(text=""))
        if is_first:
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, **nothing}
        if part.text or part.tokens:
            rest = self._rest(Part(text="", tokens=part.tokens))
            yield {"index": index, "delta": {"content": part.text}, **rest}
        if part.reason:
            yield {"index": index, "delta": {}, **nothing, "finish_reason": part.reason}

    def _rest(self, part: Part) -> Record:
        content = [self._token(record) for record in part.tokens]
        has_logprobs = self.logprobs is not None and (content or part.reason)
        return {
            "logprobs": {"content": content, "refusal": None} if has_logprobs else None,
            "finish_reason": part.reason,
        }

    def _token(self, record: TokenRecord) -> Record:
        top = self.likeliest(record) if self.logprobs else []
        own = self.token_text(record.choice.token, record.text)
        return {
            **_token_record(own, record.choice.logprob),
            "top_logprobs": [_token_record(text, logprob) for text, logprob in top],
        }


def _token_record(text: str, logprob: float | None) -> Record:
    # The bytes of a part of a character are not known.
    in_bytes = None if _HALF in text else [*text.encode()]
    return {"token": text, "logprob": logprob, "bytes": in_bytes}


def _problems(body: ChatBody) -> Iterator[str]:
    if body.top_logprobs and not body.logprobs:
        yield "top_logprobs: needs logprobs: true"
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        yield "max_tokens and max_completion_tokens are the same limit: give one of them"


def _require_template(served: ServedModel) -> ChatPrompts:
    if served.chat is None:
        raise ConfigError(
            "this model has no chat template: start the server with --chat-template FILE, or use "
            "POST /v1/completions"
        )
    return served.chat
