"""Requests to the engine, the sequences it generates for them, and the events of each step."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron.inference.engine.drafts import NgramIndex
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.runner.logprobs import TokenLogprob
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.types.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "failed"]
"""Why a sequence has ended; "failed": the logits of its next token are NaN or infinite."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, its sampling parameters and its stop conditions.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to generate; 0 for the log-probabilities of the prompt alone.
        seed: of the sequence's random draws, which do not depend on the other sequences.
        stop_tokens: generation ends with one of these.
        stop_strings: generation ends when the generated text contains one of these.
        barred: pairs of tokens; the second is never generated right after the first.
        logprobs: compute the log-probabilities of generated tokens.
        prompt_logprobs: compute the prompt tokens' log-probabilities too.
        top_logprobs: number of most likely tokens to report at each position.
        contexts: tokens of texts that the sequence attends to in addition to its own: the neighbors
            that were retrieved for a prompt, or the text of an encoder.
        min_new_tokens: number of generated tokens before which stop tokens and stop strings have
            no effect.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | str = 0
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    barred: frozenset[tuple[int, int]] = frozenset()
    logprobs: bool = False
    prompt_logprobs: bool = False
    top_logprobs: int = 0
    min_new_tokens: int = 0
    contexts: tuple[tuple[int, ...], ...] = ()


class ActiveSequence:
    """A request that is waiting or running: its prompt and the tokens generated so far.

    `num_cached` is the number of its tokens that are in the KV cache; `uses_drafts` is False once a
    draft of it had NaN.
    """

    def __init__(self, request_id: int, request: Request, new_tokens: Sequence[int] = ()):
        self.request_id, self.request = request_id, request
        self.tokens = [*request.prompt, *new_tokens]
        self.num_cached, self.uses_drafts = 0, True
        self.ngrams = NgramIndex()
        self._rng = random.Random(request.seed)
        self._draws: list[float] = []

    def followed_by(self, draft: Sequence[int]) -> "ActiveSequence":
        """Return the sequence as it is if these tokens come next; this one where there are none."""
        if not draft:
            return self
        return ActiveSequence(self.request_id, self.request, [*self.new_tokens, *draft])

    def stop_drafts(self) -> None:
        """Use no more drafts."""
        self.uses_drafts = False

    def cache(self, count: int) -> None:
        """Count further tokens as cached."""
        self.num_cached += count

    def draws(self, count: int) -> list[float]:
        """Return the random numbers of the next `count` tokens, one for each."""
        if self.request.sampling.is_greedy:
            return [0.0] * count
        self._draws += [self._rng.random() for _ in range(count - len(self._draws))]
        return self._draws[:count]

    def append(self, token: int) -> None:
        """Append a generated token, sampled with the next random number; the others are cached."""
        self.num_cached = len(self.tokens)
        self.tokens.append(token)
        del self._draws[:1]

    @property
    def num_new(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.request.prompt) :]

    def finish_reason(self, tokenizer: Tokenizer | None, max_length: int) -> FinishReason | None:
        """Return why the sequence has ended with its last token; None if it has not.

        Args:
            tokenizer: decodes tokens, for stop strings.
            max_length: most tokens of a sequence.
        """
        request = self.request
        if self.num_new > request.min_new_tokens:
            if self.tokens[-1] in request.stop_tokens:
                return "stop"
            if request.stop_strings and tokenizer:
                # A token decodes to at least one byte, or to a part of a character.
                reach = max(len(text.encode()) for text in request.stop_strings) + 4
                earliest = len(request.prompt) + request.min_new_tokens
                begin = max(earliest, len(self.tokens) - reach)
                text = text_after(tokenizer, self.tokens[begin - 1 : begin], self.tokens[begin:])
                if any(stop in text for stop in request.stop_strings):
                    return "stop"
        if self.num_new >= request.max_new_tokens or len(self.tokens) >= max_length:
            return "length"
        return None


@dataclass(frozen=True, kw_only=True)
class Event:
    """Result of one engine step for one sequence.

    Args:
        new_token: the generated token; None if max_new_tokens is 0, after a cancellation and after
            a failure.
        finish_reason: None while the sequence is running.
        prompt_tokens: log-probabilities of the prompt's tokens from the second on, with the first
            event.
    """

    request_id: int
    new_token: TokenLogprob | None
    finish_reason: FinishReason | None
    prompt_tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The finished output of a request."""

    prompt: tuple[int, ...]
    new_tokens: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    prompt_tokens: tuple[TokenLogprob, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the generated tokens."""
        return tuple(one.token for one in self.new_tokens)

    @property
    def prompt_logprobs(self) -> list[float | None]:
        """Log-probabilities of the prompt's tokens from the second on."""
        return [one.logprob for one in self.prompt_tokens]


class CompletionBuilder:
    """Collects the events of one request into its completion."""

    def __init__(self, prompt: tuple[int, ...]):
        self._prompt = prompt
        self._new_tokens: list[TokenLogprob] = []
        self._prompt_tokens: tuple[TokenLogprob, ...] = ()
        self._finish_reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        """Append an event."""
        if event.new_token:
            self._new_tokens.append(event.new_token)
        self._prompt_tokens = event.prompt_tokens or self._prompt_tokens
        self._finish_reason = event.finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether the last event ended the sequence."""
        return self._finish_reason is not None

    def build(self) -> Completion:
        """Return the completion."""
        return Completion(
            prompt=self._prompt,
            new_tokens=tuple(self._new_tokens),
            finish_reason=self._finish_reason or "length",
            prompt_tokens=self._prompt_tokens,
        )


@dataclass
class Counters:
    """What an engine did since it started.

    Args:
        reused_prompt_tokens: tokens of prompts whose keys were cached before.
        draft_tokens: tokens that were proposed by speculative decoding.
        accepted_tokens: those of them that were generated.
    """

    reused_prompt_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def __str__(self) -> str:
        return " | ".join(
            f"{name.replace('_', ' ')}: {value}" for name, value in vars(self).items()
        )

    def add_reused(self, tokens: int) -> None:
        """Count tokens of a prompt that were cached before."""
        self.reused_prompt_tokens += tokens

    def add_drafts(self, *, proposed: int = 0, accepted: int = 0) -> None:
        """Count draft tokens."""
        self.draft_tokens += proposed
        self.accepted_tokens += accepted


def cut_at_stop_string(text: str, stops: Iterable[str], *, start: int = 0) -> str:
    """Return `text` up to the first stop string at or after the character `start`."""
    ends = [index for stop in stops if (index := text.find(stop, start)) >= 0]
    return text[: min(ends)] if ends else text
