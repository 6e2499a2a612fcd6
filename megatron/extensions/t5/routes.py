"""Interface of a T5: POST /text-to-text."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse
from pydantic import Field

from megatron.common.errors import raise_if_any
from megatron.config.inference.generation import GenerationConfig
from megatron.extensions.masked_lm.routes import TextsBody, results_of
from megatron.extensions.t5.flags import DecoderSpec
from megatron.extensions.t5.inference import TextToText, load_text_to_text
from megatron.inference.engine.beam_search import Beam, BeamSearchRequest
from megatron.inference.engine.sequence import Completion, Request
from megatron.inference.loading.model_source import ModelSource
from megatron.inference.server.app import Interface
from megatron.inference.server.backend import Backend
from megatron.inference.server.engine_thread import PendingRequests, while_connected
from megatron.inference.server.errors import megatron_responses
from megatron.inference.server.schemas import SEED_LIMIT, Answer
from megatron.inference.server.served_model import ServedModel
from megatron.inference.server.web.pages import TEXT_TO_TEXT_PAGE

Record = dict[str, Any]


def text_to_text_backend(source: ModelSource, generation: GenerationConfig) -> Backend:
    """Load a T5 for the server.

    Communication: every rank must call this, in step.
    """
    model, is_first = load_text_to_text(source, generation)
    return Backend(
        engine=model.engine,
        tokenizer=model.tokenizer,
        is_first=is_first,
        interfaces=[text_to_text_interface(model)],
        page=TEXT_TO_TEXT_PAGE,
    )


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
            return [(await results_of(http, served, search))[0] for search in searches]

        def outputs_of(
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
            results = await served.in_thread(outputs_of, requests, found)
            return JSONResponse({"model": served.name, "results": results})

    return add


async def _completions(
    http: HTTPRequest, served: ServedModel, requests: Sequence[Request]
) -> list[Completion]:
    async def run() -> list[Completion]:
        with PendingRequests(served.engine_thread, requests) as pending:
            return await pending.completions()

    return await while_connected(http, run)


def _usual_new_tokens(model: TextToText, served: ServedModel) -> int:
    return min(model.spec.part(DecoderSpec).decoder_seq_length, served.limits.new_tokens)


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
