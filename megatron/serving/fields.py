"""What a client may write: the fields of requests, their limits, and how a mistake is told."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from megatron.tokenizer.tokenizer import has_half_a_surrogate_pair


def _whole(text: str) -> str:
    if has_half_a_surrogate_pair(text):
        raise ValueError("half of a surrogate pair is not a character")
    return text


_Text = Annotated[str, AfterValidator(_whole)]
_SEED = Field(None, ge=0, lt=1 << 63)


class _Body(BaseModel):
    # Strict: true is no number and "1" is none either; a whole number passes for a fraction.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class MegatronBody(_Body):
    """The fields of PUT /api. Source: the text generation server of Megatron-LM."""

    prompts: list[_Text] = Field(min_length=1)
    tokens_to_generate: int | None = Field(None, ge=0)
    logprobs: bool = False
    temperature: float | None = Field(None, gt=0, le=100)
    top_k: int | None = Field(None, ge=0, le=1000)
    top_p: float | None = Field(None, ge=0, le=1)
    top_p_decay: float = Field(0.0, ge=0, le=1)
    top_p_bound: float = Field(0.0, ge=0, le=1)
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    random_seed: int | None = _SEED
    no_log: bool = False
    beam_width: int | None = Field(None, ge=1)
    stop_token: int | None = Field(None, ge=0)
    # Further out a length to this power is no number any more.
    length_penalty: float = Field(1.0, ge=-10, le=10)


class StreamOptions(_Body):
    """What a stream tells besides the text."""

    include_usage: bool = False


class CompletionBody(_Body):
    """The fields of POST /v1/completions. Source: OpenAI's reference of the API."""

    model: str
    prompt: _Text | list[_Text] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stop: _Text | list[_Text] | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    seed: int | None = _SEED
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Clients write these with the values that change nothing.
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    presence_penalty: float = Field(0.0, ge=0, le=0)
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_text_or_tokens(cls, prompt: Any) -> Any:
        kinds = {type(part) for part in prompt} if isinstance(prompt, list) else {type(prompt)}
        if isinstance(prompt, list) and kinds == {list}:
            kinds = {type(token) for part in prompt for token in part}
            is_right = kinds <= {int}
        else:
            is_right = kinds == {str} or (isinstance(prompt, list) and kinds == {int})
        if not is_right:
            raise ValueError("give a text, a list of texts, a list of tokens or lists of tokens")
        return prompt

    @field_validator("stop")
    @classmethod
    def _has_few_short_texts(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > 16 or not all(0 < len(text) <= 256 for text in texts):
            raise ValueError("give at most 16 texts, of 1 to 256 characters each")
        return stop


_OBSOLETE = {
    "max_len": "max_len is no longer used: write tokens_to_generate",
    "sentences": "sentences is no longer used: write prompts",
}


def reasons(errors: Iterable[Mapping[str, Any]]) -> str:
    """Return one line of all that pydantic says is wrong."""
    told = []
    for error in errors:
        kind, place = error["type"], [str(part) for part in error["loc"] if part != "body"]
        if kind == "json_invalid":
            told.append(f"the body is no JSON: {error.get('ctx', {}).get('error', '')}")
        elif not place:
            told.append(
                "the body must be a JSON object, with the header Content-Type: application/json"
            )
        elif kind == "extra_forbidden":
            told.append(_OBSOLETE.get(place[0], f"{'.'.join(place)}: there is no such field"))
        elif kind == "missing":
            told.append(f"{'.'.join(place)}: is missing")
        else:
            found = repr(error.get("input"))
            shown = found if len(found) <= 60 else found[:60] + "…"
            told.append(f"{'.'.join(place)}: {error['msg']} (found {shown})")
    return printable("; ".join(told))


def printable(text: str) -> str:
    """Return `text` with what UTF-8 cannot write escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
