"""A client's requests while the engine works on them, and what becomes of them when it leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from megatron.inference.engine.beam_search import Beam, Search
from megatron.inference.engine.request import Choice, Completion, Event, Request
from megatron.inference.server.engine_thread import EngineLoop, Told

Answer = TypeVar("Answer")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class InFlight:
    """Jobs on their way; on leaving the context those that have not ended are let go.

    Raises:
        Unavailable: they cannot be taken on now.
    """

    def __init__(self, engine_loop: EngineLoop, jobs: Sequence[Request | Search]):
        self._engine_loop, self._jobs = engine_loop, jobs
        self._told: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def tell(place: int, told: Told) -> None:
            with suppress(RuntimeError):  # the event loop has ended, and nobody listens
                event_loop.call_soon_threadsafe(self._told.put_nowait, (place, told))

        self._submitted = engine_loop.submit(jobs, tell)

    def __enter__(self) -> "InFlight":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._engine_loop.cancel(self._submitted)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Yield what becomes of each request, with its place in `jobs`.

        Raises:
            Unavailable: the server ends before they do.
        """
        left = len(self._jobs)
        while left:
            place, told = await self._told.get()
            if isinstance(told, Exception):
                raise told
            assert isinstance(told, Event), "a search has no events"
            left -= told.reason is not None
            yield place, told

    async def completions(self) -> list[Completion]:
        """Return what became of each request; raises as `events` does."""
        choices: list[list[Choice]] = [[] for _ in self._jobs]
        last: dict[int, Event] = {}
        before: dict[int, tuple[Choice, ...]] = {}
        async for place, event in self.events():
            if event.choice:
                choices[place].append(event.choice)
            if event.prompt_choices:
                before[place] = event.prompt_choices
            last[place] = event
        return [
            Completion(
                prompt=one.prompt,
                tokens=tuple(choice.token for choice in choices[place]),
                reason=last[place].reason or "length",
                choices=tuple(choices[place]),
                prompt_choices=before.get(place, ()),
            )
            for place, one in enumerate(self._jobs)
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
