"""The served model, with the request limits and seeds that both interfaces share."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar

from megatron.common.errors import raise_if_any
from megatron.config.inference.server import Limits
from megatron.data.datasets.fim import FimTokens
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request
from megatron.inference.server.engine_thread import EngineThread
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.tokenizer import Tokenizer

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model.

    Args:
        vocab_size: of the model.
        name: the `model` field of OpenAI's requests.
        seed: of requests without a seed.
        sampling: defaults of PUT /api.
        chat: encodes conversations; None without a chat template.
        fim: special tokens of fill-in-the-middle; None if the model was not trained for it.
        counter: numbers the requests without a seed.
        texts_thread: where texts are encoded, rendered and decoded: one, as tokenizers have state.
    """

    engine_thread: EngineThread
    tokenizer: Tokenizer
    vocab_size: int
    limits: Limits
    name: str
    seed: int
    sampling: SamplingParams = SamplingParams()
    chat: ChatPrompts | None = None
    fim: FimTokens | None = None
    counter: "count[int]" = field(default_factory=lambda: count(1))
    texts_thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="texts")
    )

    async def in_thread(
        self, function: Callable[..., Result], *args: Any, **options: Any
    ) -> Result:
        """Call a function that takes long, while the event loop answers other requests."""
        call = partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self.texts_thread, call)

    def seeds(self, requested: int | None, num_sequences: int) -> list[str]:
        """Return a seed for each sequence of a request."""
        first = f"{self.seed}:{next(self.counter)}" if requested is None else f"{requested}"
        return [f"{first}:{index}" for index in range(num_sequences)]

    def new_tokens(
        self, prompts: Sequence[Sequence[int]], requested: int | None, usual: int, copies: int = 1
    ) -> int:
        """Return the limit of generated tokens (default: `usual`, at most the limits)."""
        if requested is not None:
            return requested
        num_prompt = sum(map(len, prompts))
        room = self.engine_thread.engine.max_length - max(map(len, prompts))
        budget = (self.limits.request_tokens // copies - num_prompt) // len(prompts)
        return max(1, min(usual, self.limits.new_tokens, room, budget))

    def require_room(self, prompts: Sequence[Sequence[int]], new_tokens: int, copies: int) -> None:
        """Refuse requests beyond the limits of the server.

        Raises:
            ConfigError: lists every limit that is exceeded.
        """
        longest, room = max(map(len, prompts)), self.engine_thread.engine.max_length
        found = [*self.limit_problems(prompts, new_tokens, copies)]
        if longest + new_tokens > room:
            found.append(
                f"a prompt of {longest} tokens and {new_tokens} new ones are more than the "
                f"{room} tokens of a sequence"
            )
        raise_if_any(found)

    def limit_problems(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, copies: int = 1
    ) -> Iterator[str]:
        """Yield every limit of the server that a request exceeds."""
        limits = self.limits
        if len(prompts) > limits.prompts:
            yield f"{len(prompts)} prompts are more than {limits.prompts}"
        if new_tokens > limits.new_tokens:
            yield f"{new_tokens} new tokens are more than {limits.new_tokens}"
        tokens = copies * sum(len(prompt) + new_tokens for prompt in prompts)
        if tokens > limits.request_tokens:
            yield (
                f"{tokens} tokens of all prompts and continuations are more than "
                f"{limits.request_tokens}"
            )

    def candidate_problems(self, **counts: int | None) -> Iterator[str]:
        """Yield the fields of a request that need more tokens to choose from than there are."""
        for name, count_of_tokens in counts.items():
            if (count_of_tokens or 0) > self.vocab_size:
                yield (
                    f"{name}: {count_of_tokens} is more than the vocabulary's {self.vocab_size} "
                    "tokens"
                )

    def sampling_of(
        self, temperature: float | None, top_k: int | None, top_p: float | None
    ) -> SamplingParams:
        """Return sampling parameters; fields that a request leaves out have the server's defaults."""
        usual = self.sampling
        if top_k is None and top_p is None:
            top_k, top_p = usual.top_k, usual.top_p
        return SamplingParams(
            temperature=usual.temperature if temperature is None else temperature,
            top_k=top_k or 0,
            top_p=top_p or 0.0,
        )

    def require_possible(self, requests: Sequence[Request]) -> None:
        """Refuse requests that the engine would refuse.

        Raises:
            ConfigError: lists all problems of the requests.
        """
        engine = self.engine_thread.engine
        raise_if_any(dict.fromkeys(p for request in requests for p in engine.problems(request)))
