"""Interfaces of BERT (POST /fill-mask, POST /embeddings) and T5 (POST /text-to-text)."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse
from pydantic import Field

from megatron.common.errors import raise_if_any
from megatron.extensions.bert.inference import Assessment, MaskedLM, MaskedLMRequest, mask_notice
from megatron.extensions.t5.inference import TextToText
from megatron.inference.engine.beam_search import Beam, BeamSearchRequest
from megatron.inference.engine.continuous_batching import ExclusiveRequest
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.server.app import Interface
from megatron.inference.server.engine_thread import PendingRequests, while_connected
from megatron.inference.server.errors import megatron_responses
from megatron.inference.server.schemas import SEED_LIMIT, Answer, Body, Texts
from megatron.inference.server.served_model import ServedModel

Record = dict[str, Any]
Result = TypeVar("Result")


class TextsBody(Body):
    """A body with texts."""

    texts: Texts


class FillMaskBody(TextsBody):
    """The fields of POST /fill-mask; a tab in a text stands between two segments."""

    top: int = Field(5, ge=1, le=1000)


class CandidateAnswer(Answer):
    """A token for a [MASK], and its probability."""

    token: str
    probability: float


class FillMaskResult(Answer):
    """Candidates for each [MASK] of a text; without one, its pseudo-log-likelihood."""

    masks: list[list[CandidateAnswer]]
    log_likelihood: float | None = None
    num_tokens: int | None = None
    in_order: float | None = None
    notice: str | None = None


class FillMaskAnswer(Answer):
    """The answer of POST /fill-mask, with a result for each text."""

    model: str
    results: list[FillMaskResult]


class EmbeddingsAnswer(Answer):
    """The answer of POST /embeddings: the mean of the last hidden states of each text."""

    model: str
    embeddings: list[list[float]]


class TextToTextBody(TextsBody):
    """The fields of POST /text-to-text; temperature 0 is greedy."""

    max_new_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0, le=1000)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, lt=SEED_LIMIT)
    beam_width: int | None = Field(None, ge=1)
    # Beyond this range, length ** length_penalty overflows or is zero.
    length_penalty: float = Field(1.0, ge=-10, le=10)


class TextToTextResult(Answer):
    """Generated text; `filled` is the input with the spans in place of its sentinels."""

    text: str
    filled: str | None = None
    finished: bool


class TextToTextAnswer(Answer):
    """The answer of POST /text-to-text, with a result for each text."""

    model: str
    results: list[TextToTextResult]


def fill_mask_interface(model: MaskedLM) -> Interface:
    """Return the interface of a BERT: POST /fill-mask and POST /embeddings."""

    def add(app: FastAPI, served: ServedModel) -> None:
        def request_for(body: TextsBody, **options: Any) -> MaskedLMRequest:
            model.require_tokens(body.texts)
            tokens = [model.tokens_and_types(text)[0] for text in body.texts]
            raise_if_any(served.limit_problems(tokens, 0))
            prompt = tuple(token for row in tokens for token in row)
            return MaskedLMRequest(prompt=prompt, texts=tuple(body.texts), **options)

        async def assessed(http: HTTPRequest, body: TextsBody, **options: Any) -> list[Assessment]:
            request = await served.in_thread(request_for, body, **options)
            return await _results(http, served, request)

        @app.post("/fill-mask", responses=megatron_responses(FillMaskAnswer))
        async def fill_mask(body: FillMaskBody, http: HTTPRequest) -> JSONResponse:
            found = await assessed(http, body, top=body.top)
            results = [_fill_mask_result(*pair) for pair in zip(body.texts, found, strict=True)]
            return JSONResponse({"model": served.name, "results": results})

        @app.post("/embeddings", responses=megatron_responses(EmbeddingsAnswer))
        async def embeddings(body: TextsBody, http: HTTPRequest) -> JSONResponse:
            found = await assessed(http, body, embeds=True)
            rows = [one.embedding for one in found]
            return JSONResponse({"model": served.name, "embeddings": rows})

    return add


def text_to_text_interface(model: TextToText) -> Interface:
    """Return the interface of a T5: POST /text-to-text."""

    def add(app: FastAPI, served: ServedModel) -> None:
        def requests_for(body: TextToTextBody) -> list[Request]:
            most = body.max_new_tokens or _usual_new_tokens(model, served)
            raise_if_any(_text_to_text_problems(served, model, body, most))
            requests = model.requests(
                body.texts,
                seeds=served.seeds(body.seed, len(body.texts)),
                max_new_tokens=most,
                sampling=served.sampling_of(body.temperature, body.top_k, body.top_p),
            )
            sources = [source for request in requests for source in request.contexts]
            raise_if_any(served.limit_problems(sources, most, body.beam_width or 1))
            return requests

        async def generated(
            body: TextToTextBody, http: HTTPRequest, requests: Sequence[Request]
        ) -> Sequence[Completion | Beam]:
            if body.beam_width is None:
                return await _completions(http, served, requests)
            searches = (
                BeamSearchRequest.of(request, body.beam_width, body.length_penalty)
                for request in requests
            )
            return [(await _results(http, served, search))[0] for search in searches]

        def results_of(
            requests: Sequence[Request], found: Sequence[Completion | Beam]
        ) -> list[Record]:
            outputs = map(model.output, requests, found)
            return [
                {"text": one.text, "filled": one.filled, "finished": one.is_finished}
                for one in outputs
            ]

        @app.post("/text-to-text", responses=megatron_responses(TextToTextAnswer))
        async def text_to_text(body: TextToTextBody, http: HTTPRequest) -> JSONResponse:
            requests = await served.in_thread(requests_for, body)
            found = await generated(body, http, requests)
            results = await served.in_thread(results_of, requests, found)
            return JSONResponse({"model": served.name, "results": results})

    return add


async def _results(
    http: HTTPRequest, served: ServedModel, request: ExclusiveRequest[Any]
) -> list[Any]:
    async def run() -> list[Any]:
        with PendingRequests(served.engine_thread, [request]) as pending:
            return await pending.results()

    return await while_connected(http, run)


async def _completions(
    http: HTTPRequest, served: ServedModel, requests: Sequence[Request]
) -> list[Completion]:
    async def run() -> list[Completion]:
        with PendingRequests(served.engine_thread, requests) as pending:
            return await pending.completions()

    return await while_connected(http, run)


def _fill_mask_result(text: str, found: Assessment) -> Record:
    is_scored = found.log_likelihood is not None
    return {
        "masks": [
            [{"token": one.token, "probability": one.probability} for one in candidates]
            for candidates in found.masks
        ],
        "log_likelihood": found.log_likelihood,
        "num_tokens": found.num_tokens if is_scored else None,
        "in_order": found.in_order,
        "notice": mask_notice(text),
    }


def _usual_new_tokens(model: TextToText, served: ServedModel) -> int:
    return min(model.spec.decoder_seq_length, served.limits.new_tokens)


def _text_to_text_problems(
    served: ServedModel, model: TextToText, body: TextToTextBody, most: int
) -> Iterator[str]:
    if model.max_length is not None and most > model.max_length:
        yield f"max_new_tokens: {most} is more than the network's {model.max_length} positions"
    if body.top_k and body.top_p:
        yield "top_k and top_p exclude each other: give one of them"
    yield from served.candidate_problems(top_k=body.top_k, beam_width=body.beam_width)
    if body.beam_width is None:
        if body.length_penalty != 1:
            yield "length_penalty: is for beam_width"
        return
    if body.beam_width > model.engine.rows:
        yield f"beam_width: {body.beam_width} is more than --micro-batch-size {model.engine.rows}"
    sampled = {"temperature": body.temperature, "top_k": body.top_k, "top_p": body.top_p}
    if given := [name for name, value in sampled.items() if value is not None]:
        yield f"beam_width: does not go with {', '.join(given)}"
