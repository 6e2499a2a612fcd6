"""Common parts of BERT's and T5's routes: bodies with texts, and requests that run alone."""

from typing import Any

from fastapi import Request as HTTPRequest

from megatron.inference.engine.continuous_batching import ExclusiveRequest
from megatron.inference.server.engine_thread import PendingRequests, while_connected
from megatron.inference.server.schemas import Body, Texts
from megatron.inference.server.served_model import ServedModel


class TextsBody(Body):
    """A body with texts."""

    texts: Texts


async def results_of(
    http: HTTPRequest, served: ServedModel, request: ExclusiveRequest[Any]
) -> list[Any]:
    """Return the results of a request, unless its client disconnects."""

    async def run() -> list[Any]:
        with PendingRequests(served.engine_thread, [request]) as pending:
            return await pending.results()

    return await while_connected(http, run)
