"""PUT /api, the interface of Megatron-LM's text generation server: fields, sampling, beam search."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, Field

from megatron.common.errors import raise_if_any
from megatron.inference.engine.beam_search import Beam, BeamSearchRequest
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.loading.detokenizer import texts_of_each
from megatron.inference.server.engine_thread import PendingRequests, while_connected
from megatron.inference.server.errors import megatron_responses
from megatron.inference.server.schemas import SEED_LIMIT, Answer, Body, Texts
from megatron.inference.server.served_model import ServedModel

Record = dict[str, Any]

_USUAL_NEW_TOKENS = 64


class MegatronBody(Body):
    """The fields of PUT /api. Source: the text generation server of Megatron-LM."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"prompts": {"items": {"minLength": 1}}}},
                {"properties": {"add_BOS": {"const": True}}, "required": ["add_BOS"]},
            ]
        }
    )

    prompts: Texts
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
    random_seed: int | None = Field(None, ge=0, lt=SEED_LIMIT)
    no_log: bool = False
    beam_width: int | None = Field(None, ge=1)
    stop_token: int | None = Field(None, ge=0)
    # Beyond this range, length ** length_penalty overflows or is zero.
    length_penalty: float = Field(1.0, ge=-10, le=10)


class MegatronAnswer(Answer):
    """The answer of PUT /api: texts with their prompts, `scores` with beam_width alone."""

    text: list[str]
    segments: list[list[str]]
    logprobs: list[list[float]] | None = None
    scores: list[float] | None = None


def add_megatron_api(app: FastAPI, served: ServedModel) -> None:
    """Add the route PUT /api."""

    @app.put("/api", responses=megatron_responses(MegatronAnswer))
    async def api(body: MegatronBody, http: HTTPRequest) -> JSONResponse:
        http.state.no_log = body.no_log
        return JSONResponse(await while_connected(http, lambda: _answer(served, body)))


async def _answer(served: ServedModel, body: MegatronBody) -> Record:
    """Generate, and return the response to `body`.

    Raises:
        ConfigError, DataError: lists all problems of the fields.
        Unavailable: the queue is full, or the server is shutting down.
    """
    requests = await served.in_thread(_possible_requests, served, body)
    with PendingRequests(served.engine_thread, requests) as pending:
        if body.beam_width is not None:
            return await served.in_thread(_beams, served, requests[0], await pending.results())
        done = await pending.completions()
        return await served.in_thread(_completions, served, body, done)


def _possible_requests(
    served: ServedModel, body: MegatronBody
) -> Sequence[Request] | Sequence[BeamSearchRequest]:
    """Return the requests of `body` to the engine: one for each prompt, or a beam search.

    Raises:
        ConfigError, DataError: lists all problems of the fields.
    """
    raise_if_any(_problems(served, body))
    prompts = [_tokens(served, body, text) for text in body.prompts]
    new_tokens = served.new_tokens(prompts, body.tokens_to_generate, _USUAL_NEW_TOKENS)
    served.require_room(prompts, new_tokens, body.beam_width or 1)
    if body.beam_width is not None:
        return [_search(served, body, prompts[0], body.beam_width, new_tokens)]
    requests = _requests(served, body, prompts, new_tokens)
    served.require_possible(requests)
    return requests


def _problems(served: ServedModel, body: MegatronBody) -> Iterator[str]:
    if body.tokens_to_generate == 0 and not body.logprobs:
        yield "tokens_to_generate: 0 needs logprobs: there is nothing else to return"
    if body.top_k and body.top_p:
        yield "top_k and top_p exclude each other: give one of them"
    yield from served.candidate_problems(top_k=body.top_k, beam_width=body.beam_width)
    if (body.top_p_decay or body.top_p_bound) and not body.top_p:
        yield "top_p_decay and top_p_bound need a top_p"
    elif body.top_p_bound > (body.top_p or 0):
        yield f"top_p_bound: {body.top_p_bound} is more than top_p {body.top_p}"
    if not body.add_BOS and "" in body.prompts:
        yield "prompts: an empty text needs add_BOS"
    if body.beam_width is None:
        return
    if len(body.prompts) != 1:
        yield f"beam_width: a search needs exactly 1 prompt, and there are {len(body.prompts)}"
    if body.tokens_to_generate == 0:
        yield "beam_width: a search needs tokens_to_generate of at least 1"
    if (body.stop_token or 0) >= served.vocab_size:
        yield f"stop_token: {body.stop_token} is not in the vocabulary of {served.vocab_size}"


def _tokens(served: ServedModel, body: MegatronBody, text: str) -> list[int]:
    tokens = served.tokenizer.encode(text)
    if not body.add_BOS:
        return tokens
    ids = served.tokenizer.special_ids
    begin = ids["bos"] if "bos" in ids else served.tokenizer.eod  # noqa: SIM401 (no eod is an error)
    # Some tokenizers add it themselves.
    return tokens if tokens[:1] == [begin] else [begin, *tokens]


def _sampling(served: ServedModel, body: MegatronBody) -> SamplingParams:
    return replace(
        served.sampling_of(body.temperature, body.top_k, body.top_p),
        top_p_decay=body.top_p_decay,
        top_p_bound=body.top_p_bound,
    )


def _requests(
    served: ServedModel, body: MegatronBody, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[Request]:
    tokenizer = served.tokenizer
    ends = {"\n": body.stop_on_eol, "\n\n": body.stop_on_double_eol}
    barred = []
    if body.prevent_newline_after_colon:
        barred.append((tokenizer.encode(":")[-1], tokenizer.encode("\n")[-1]))
    common = Request(
        prompt=(),
        max_new_tokens=new_tokens,
        sampling=_sampling(served, body),
        stop_tokens=frozenset({tokenizer.eod}),
        stop_strings=tuple(text for text, is_one in ends.items() if is_one),
        barred=frozenset(barred),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs,
    )
    seeds = served.seeds(body.random_seed, len(prompts))
    return [
        replace(common, prompt=tuple(prompt), seed=seed)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]


def _search(
    served: ServedModel, body: MegatronBody, prompt: Sequence[int], width: int, new_tokens: int
) -> BeamSearchRequest:
    stop = served.tokenizer.eod if body.stop_token is None else body.stop_token
    return BeamSearchRequest(
        prompt=tuple(prompt),
        width=width,
        max_new_tokens=new_tokens,
        stop_tokens=frozenset({stop}),
        length_penalty=body.length_penalty,
    )


def _beams(
    served: ServedModel, search: Request | BeamSearchRequest, beams: Sequence[Beam]
) -> Record:
    sequences = [[*search.prompt, *beam.tokens] for beam in beams]
    return {**_texts(served, sequences), "scores": [beam.score for beam in beams]}


def _completions(served: ServedModel, body: MegatronBody, done: Sequence[Completion]) -> Record:
    logprobs = [[*one.prompt_logprobs, *(new.logprob for new in one.new_tokens)] for one in done]
    texts = _texts(served, [[*one.prompt, *one.tokens] for one in done])
    return {**texts, "logprobs": logprobs if body.logprobs else None}


def _texts(served: ServedModel, sequences: Sequence[Sequence[int]]) -> Record:
    return {
        "text": [served.tokenizer.decode(tokens) for tokens in sequences],
        "segments": [texts_of_each(served.tokenizer, tokens) for tokens in sequences],
    }
