"""The model that is served, and what a request may ask of it: what both interfaces share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from megatron.common.errors import raise_if_any
from megatron.config.inference.server import Limits
from megatron.data.datasets.fim import FimTokens
from megatron.inference.engine.request import Request
from megatron.inference.engine.sampling import Sampling
from megatron.inference.server.engine_thread import EngineLoop
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that is served.

    Args:
        vocab_size: of the network.
        name: what clients call the model.
        sampling: of requests of PUT /api that do not say.
        seed: what the draws of requests without a seed of their own follow from.
        chat: how conversations are read; None without a chat template.
        fim: the special tokens of fill-in-the-middle; None if the model was not trained for it.
    """

    engine_loop: EngineLoop
    tokenizer: Tokenizer
    vocab_size: int
    limits: Limits
    name: str
    sampling: Sampling
    seed: int
    chat: ChatPrompts | None = None
    fim: FimTokens | None = None
    numbers: "count[int]" = field(default_factory=lambda: count(1))

    def seeds(self, asked: int | None, number: int) -> list[str]:
        """Return the seeds of so many sequences of a request."""
        first = f"{self.seed}:{next(self.numbers)}" if asked is None else f"{asked}"
        return [f"{first}:{place}" for place in range(number)]

    def new_tokens(
        self, prompts: Sequence[Sequence[int]], asked: int | None, usual: int, copies: int = 1
    ) -> int:
        """Return how many tokens may follow (default: `usual`, or what there is room for)."""
        if asked is not None:
            return asked
        read = sum(map(len, prompts))
        room = self.engine_loop.engine.max_length - max(map(len, prompts))
        budget = (self.limits.request_tokens // copies - read) // len(prompts)
        return max(1, min(usual, self.limits.new_tokens, room, budget))

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
