"""POST /v1/completions: OpenAI's interface to continue prompts."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

from megatron.common.errors import ConfigError, raise_if_any
from megatron.inference.server.openai.choices import Part, Prompt, TokenRecord
from megatron.inference.server.openai.records import Record
from megatron.inference.server.openai.request import OpenAIRequest, require_vocabulary
from megatron.inference.server.openai.request_schemas import CompletionBody
from megatron.inference.server.served_model import ServedModel
from megatron.tokenizer.special import encode_alone

_USUAL_NEW_TOKENS = 16


class CompletionRequest(OpenAIRequest):
    """One request of POST /v1/completions.

    Raises:
        ConfigError, DataError: lists what cannot be done.
        UnknownModel: another model is requested.
    """

    id_prefix: ClassVar[str] = "cmpl"
    object_name: ClassVar[str] = "text_completion"
    chunk_name: ClassVar[str] = "text_completion"
    records_stop_token: ClassVar[bool] = True

    def __init__(self, served: ServedModel, body: CompletionBody):
        raise_if_any(_problems(served, body))
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

    def choice(self, index: int, part: Part) -> Record:
        """Return a choice, of a whole answer or of an event."""
        return {
            "index": index,
            "text": part.text,
            "logprobs": None if self.logprobs is None else self._logprobs(part.tokens),
            "finish_reason": part.reason,
        }

    def chunks(self, index: int, part: Part, *, is_first: bool) -> Iterator[Record]:
        """Yield the choice of an event, unless it would bring nothing."""
        if part.text or part.tokens or part.reason:
            yield self.choice(index, part)

    def _logprobs(self, records: Sequence[TokenRecord]) -> Record:
        return {
            "tokens": [self.token_text(one.choice.token, one.text) for one in records],
            "token_logprobs": [one.choice.logprob for one in records],
            "top_logprobs": [
                None if one.choice.logprob is None else dict(self.likeliest(one)) for one in records
            ],
            "text_offset": [one.offset for one in records],
        }


def _problems(served: ServedModel, body: CompletionBody) -> Iterator[str]:
    if body.best_of is not None and body.best_of < body.n:
        yield f"best_of: {body.best_of} is less than n, {body.n}"
    if body.best_of is not None and body.best_of > body.n and body.stream:
        yield "best_of: the best are known at the end, so that they cannot be streamed"
    if not body.suffix:
        return
    if served.fim is None:
        yield "suffix: this model was not trained for fill-in-the-middle (--fim-rate); leave it out"
    if body.echo:
        yield "suffix: echo repeats a prompt, and cannot repeat what is around a gap; leave one out"
    if not isinstance(body.prompt, str):
        yield "suffix: the prompt must be one text"


def _prompts(served: ServedModel, body: CompletionBody) -> Iterator[Prompt]:
    """Yield text and tokens of each prompt; an empty one is the beginning of a document."""
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    for prompt in [given] if is_one else given:
        if isinstance(prompt, str):
            tokens = _encoded(served, body, prompt)
            yield Prompt(text=prompt, tokens=tokens or (served.tokenizer.eod,))
        elif isinstance(prompt, list):
            tokens = tuple(token for token in prompt if isinstance(token, int))
            require_vocabulary(tokens, served.vocab_size)
            # A prompt of tokens can be long, and is spelled for those who want to read it.
            yield Prompt(text=served.tokenizer.decode(tokens) if body.echo else "", tokens=tokens)


def _encoded(served: ServedModel, body: CompletionBody, text: str) -> tuple[int, ...]:
    tokenizer = served.tokenizer
    if not body.suffix:
        encode = tokenizer.encode if body.add_special_tokens else encode_alone(tokenizer)
        return tuple(encode(text))
    if served.fim is None:
        raise ConfigError("suffix: this model was not trained for fill-in-the-middle")
    fim, encode = served.fim, tokenizer.encode  # as in training
    return (fim.prefix, *encode(text), fim.suffix, *encode(body.suffix), fim.middle)
