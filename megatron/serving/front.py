"""What both interfaces share: the model they talk about, and how texts become tokens."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from megatron.errors import raise_if_any
from megatron.generation.request import Request
from megatron.generation.sampling import Sampling
from megatron.plan.serving_plan import Limits
from megatron.serving.engine_loop import EngineLoop
from megatron.tokenizer.tokenizer import Tokenizer

Answer = TypeVar("Answer")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """The model that is served.

    Args:
        vocab_size: of the network.
        name: what clients call the model.
        sampling: of requests of PUT /api that do not say.
        seed: what the draws of requests without a seed of their own follow from.
    """

    engine_loop: EngineLoop
    tokenizer: Tokenizer
    vocab_size: int
    limits: Limits
    name: str
    sampling: Sampling
    seed: int
    numbers: "count[int]" = field(default_factory=lambda: count(1))

    def seeds(self, asked: int | None, number: int) -> list[str]:
        """Return the seeds of so many sequences of a request."""
        first = f"{self.seed}:{next(self.numbers)}" if asked is None else f"{asked}"
        return [f"{first}:{place}" for place in range(number)]

    def new_tokens(self, prompts: Sequence[Sequence[int]], asked: int | None, usual: int) -> int:
        """Return how many tokens may follow: as usual when it is not said, if there is room."""
        if asked is not None:
            return asked
        room = self.engine_loop.engine.max_length - max(map(len, prompts))
        return max(1, min(usual, self.limits.new_tokens, room))

    def require_room(self, prompts: Sequence[Sequence[int]], new_tokens: int, copies: int) -> None:
        """Refuse what is more than this server takes on.

        Raises:
            ConfigError: lists every limit that is exceeded.
        """
        limits, room = self.limits, self.engine_loop.engine.max_length
        found = []
        if len(prompts) > limits.prompts:
            found.append(f"{len(prompts)} prompts are more than {limits.prompts}")
        if new_tokens > limits.new_tokens:
            found.append(f"{new_tokens} new tokens are more than {limits.new_tokens}")
        longest = max(map(len, prompts))
        if longest + new_tokens > room:
            found.append(
                f"a prompt of {longest} tokens and {new_tokens} new ones are more than the "
                f"{room} that the model has room for"
            )
        tokens = copies * sum(len(prompt) + new_tokens for prompt in prompts)
        if tokens > limits.request_tokens:
            found.append(
                f"{tokens} tokens of all prompts and what may follow them are more than "
                f"{limits.request_tokens}"
            )
        raise_if_any(found)

    def require_possible(self, requests: Sequence[Request]) -> None:
        """Refuse what the engine would refuse.

        Raises:
            ConfigError: lists what is wrong with the requests.
        """
        engine = self.engine_loop.engine
        raise_if_any(dict.fromkeys(p for request in requests for p in engine.problems(request)))


async def while_connected(
    http: HttpRequest, work: Callable[[], Coroutine[Any, Any, Answer]]
) -> Answer:
    """Return what `work` returns; when the client leaves, it is cancelled.

    Raises:
        ClientGone: nobody is there to be answered.
    """

    async def left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work()), asyncio.create_task(left())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
