"""What a client has asked for, as the event loop that talks to the client sees it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from types import TracebackType

from megatron.generation.beam import Beam, Search
from megatron.generation.request import Choice, Completion, Event, Request
from megatron.serving.engine_loop import EngineLoop, Told


class Asked:
    """Jobs on their way; on leaving the context those that have not ended are let go.

    Raises:
        Unavailable: they cannot be taken on now.
    """

    def __init__(self, engine_loop: EngineLoop, asked: Sequence[Request | Search]):
        self._engine_loop, self._asked = engine_loop, asked
        self._told: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def tell(place: int, told: Told) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and nobody listens
                event_loop.call_soon_threadsafe(self._told.put_nowait, (place, told))

        self._jobs = engine_loop.submit(asked, tell)

    def __enter__(self) -> "Asked":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine_loop.cancel(self._jobs)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield what becomes of each request, with its place in `asked`.

        Raises:
            Unavailable: the server ends before they do.
        """
        left = len(self._asked)
        while left:
            place, told = await self._told.get()
            if isinstance(told, Exception):
                raise told
            assert isinstance(told, Event), "a search has no events"
            left -= told.reason is not None
            yield place, told

    async def completions(self) -> list[Completion]:
        """Return what became of each request; raises as `events` does."""
        choices: list[list[Choice]] = [[] for _ in self._asked]
        last: dict[int, Event] = {}
        before: dict[int, tuple[float, ...]] = {}
        async for place, event in self.events():
            if event.choice:
                choices[place].append(event.choice)
            if event.prompt_logprobs:
                before[place] = event.prompt_logprobs
            last[place] = event
        return [
            Completion(
                prompt=one.prompt,
                tokens=tuple(choice.token for choice in choices[place]),
                reason=last[place].reason or "length",
                choices=tuple(choices[place]),
                prompt_logprobs=before.get(place, ()),
            )
            for place, one in enumerate(self._asked)
        ]

    async def beams(self) -> list[Beam]:
        """Return what the only search found.

        Raises:
            ConfigError: it cannot be done.
            Unavailable: the server ends.
        """
        _, told = await self._told.get()
        if isinstance(told, Exception):
            raise told
        assert isinstance(told, list), "a request has no beams"
        return told
