"""What is asked of the engine, and what it tells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from megatron.inference.engine.sampling import Sampling

Reason = Literal["stop", "length", "cancelled", "failed"]
"""Why a sequence ends; it fails when the network gives no numbers for its next token."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to go on from it.

    Args:
        prompt: tokens, one at least.
        max_new_tokens: most tokens to add; 0 to learn the prompt's probabilities alone.
        seed: what the draws of this sequence follow from, whatever else is generated beside it.
        stop_tokens: the text ends with one of these.
        stop_strings: the text ends where its own tokens spell one of these.
        barred: pairs of tokens of which the second is never chosen right after the first.
        logprobs: whether probabilities of tokens are told.
        prompt_logprobs: whether those of the prompt are told too.
        top_logprobs: of how many likeliest tokens at each position.
        min_new_tokens: number of generated tokens before which neither stop tokens nor stop
            strings end the text.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | str = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    barred: frozenset[tuple[int, int]] = frozenset()
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    min_new_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A token, and how likely it was among all real ones before temperature and limits."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a step found for one sequence.

    Args:
        number: of the sequence.
        choice: its next token; None when it wanted none, was cancelled, or failed.
        reason: why it has ended; None while it goes on.
        prompt_choices: log-probabilities of the prompt's tokens from the second on, with the first
            event.
    """

    number: int
    choice: Choice | None
    reason: Reason | None
    prompt_choices: tuple[Choice, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of a request."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    reason: Reason
    choices: tuple[Choice, ...]
    prompt_choices: tuple[Choice, ...] = ()

    @property
    def prompt_logprobs(self) -> list[float | None]:
        """Log-probabilities of the prompt's tokens from the second on."""
        return [choice.logprob for choice in self.prompt_choices]


def without_stop(text: str, stops: Iterable[str], *, start: int = 0) -> str:
    """Return `text` up to the first stop string at or behind the character `start`."""
    ends = [place for stop in stops if (place := text.find(stop, start)) >= 0]
    return text[: min(ends)] if ends else text
