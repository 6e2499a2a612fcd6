"""Interface of a BERT: POST /fill-mask and POST /embeddings."""

from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import JSONResponse
from pydantic import Field

from megatron.common.errors import raise_if_any
from megatron.config.inference.generation import GenerationConfig
from megatron.extensions.bert.inference import (
    Assessment,
    MaskedLM,
    MaskedLMRequest,
    load_masked_lm,
    mask_notice,
)
from megatron.extensions.masked_lm.routes import TextsBody, results_of
from megatron.inference.engine.encoder_runner import SerialEngine
from megatron.inference.loading.model_source import ModelSource
from megatron.inference.server.app import Interface
from megatron.inference.server.backend import Backend
from megatron.inference.server.errors import megatron_responses
from megatron.inference.server.schemas import Answer
from megatron.inference.server.served_model import ServedModel
from megatron.inference.server.web.pages import FILL_MASK_PAGE


def masked_lm_backend(source: ModelSource, generation: GenerationConfig) -> Backend:
    """Load a BERT for the server.

    Communication: every rank must call this, in step.
    """
    model, is_first = load_masked_lm(source, generation)
    return Backend(
        engine=SerialEngine(model.runner, model),
        tokenizer=model.tokenizer,
        is_first=is_first,
        interfaces=[fill_mask_interface(model)],
        page=FILL_MASK_PAGE,
    )


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
            return await results_of(http, served, request)

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


def _fill_mask_result(text: str, found: Assessment) -> dict[str, Any]:
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
