"""Continuous batching: schedules requests, runs prefill and decode steps, and samples tokens."""

import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.common.errors import ConfigError, MegatronError
from megatron.inference.engine.drafts import accepted_tokens
from megatron.inference.engine.next_tokens import next_tokens
from megatron.inference.engine.prefix_cache import PrefixCache
from megatron.inference.engine.scheduler import Scheduler
from megatron.inference.engine.sequence import (
    ActiveSequence,
    Completion,
    CompletionBuilder,
    Counters,
    Event,
    Request,
)
from megatron.inference.runner.device import to_device
from megatron.inference.runner.logprobs import TokenLogprob
from megatron.inference.runner.model_runner import ModelRunner
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_CLOSE = -1
"""Request id that closes the engine."""


class Candidate(Protocol):
    """One of the results of an exclusive request, such as a beam."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The generated tokens."""
        ...


Found = TypeVar("Found", bound=Candidate)

_Sampled = tuple[list[list[TokenLogprob | None]], list[TokenLogprob]]
"""New tokens of each sequence, and log-probabilities of the first one's prompt."""


class ExclusiveRequest(ABC, Generic[Found]):
    """A request that runs alone, outside continuous batching, such as a beam search."""

    prompt: tuple[int, ...]
    contexts: tuple[tuple[int, ...], ...] = ()

    @abstractmethod
    def problems(self, engine: "InferenceEngine") -> Iterator[str]:
        """Yield every reason to refuse the request."""

    @abstractmethod
    def run(self, runner: ModelRunner) -> Generator[None, None, list[Found]]:
        """Run the request, and return its results. Yields after each step.

        Raises:
            MegatronError: the logits are NaN or infinite, on all ranks alike.

        Communication: every rank runs it, in step.
        """


class InferenceEngine:
    """Generates tokens for many sequences at once; they join and leave the batch between steps.

    Every rank has an engine. Requests are added to the engine of a replica's first rank, which is
    closed in the end; the replica's other ranks `follow()`.

    Args:
        runner: runs this rank's part of the model.
        rows: most running sequences.
        tokenizer: decodes tokens, for requests with stop strings.
        recompute: prefill all tokens again for each new one instead of keeping states.
        batched_tokens: most tokens of one prefill, padding included; longer prompts are computed in
            chunks between decode steps.
        prefix_caching: keep the tokens of ended sequences in their rows, and reuse prefixes of prompts.
        draft_tokens: most tokens of a draft by prompt lookup; 0 for no speculative decoding.

    Raises:
        ConfigError: drafts are impossible.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        rows: int,
        tokenizer: Tokenizer | None = None,
        recompute: bool = False,
        batched_tokens: int = 2048,
        prefix_caching: bool = True,
        draft_tokens: int = 0,
    ):
        if draft_tokens and runner.no_extension:
            raise ConfigError(
                f"--prompt-lookup-num-tokens {draft_tokens}: drafts are impossible, because "
                f"{runner.no_extension}; leave it out"
            )
        self._draft_tokens = draft_tokens
        self.runner, self.rows, self.tokenizer = runner, rows, tokenizer
        self.recompute, self.max_length = recompute, runner.max_length
        self.counters = Counters()
        cache = None
        if prefix_caching and runner.states and not runner.no_extension:
            cache = PrefixCache(runner.states, rows=rows, counters=self.counters)
        self._scheduler = Scheduler(
            runner.states,
            rows=rows,
            batched_tokens=batched_tokens,
            chunks=not runner.no_extension,
            prefix_cache=cache,
        )
        self._last_id = 0
        self._changes: list[tuple[int, Request | ExclusiveRequest[Any] | None]] = []
        self._exclusive: Generator[None, None, list[Any]] | None = None
        self._exclusive_id = 0
        self._found: list[Any] | MegatronError = []
        self._is_open = True
        self._sampled: _Sampled | None = None
        self._unrecorded: Sequence[ActiveSequence] = ()

    @property
    def is_busy(self) -> bool:
        """Whether the next step has work."""
        return bool(self._changes or self._scheduler.is_busy or self._exclusive)

    def problems(self, request: Request) -> Iterator[str]:
        """Yield every reason to refuse a request."""
        length, vocab_size = len(request.prompt), self.runner.spec.vocabulary.vocab_size
        room = self.max_length - (1 if request.max_new_tokens else 0)
        if not 0 < length <= room:
            yield (
                f"a prompt has {length} tokens; it needs at least 1 and at most {room}: a sequence "
                f"has at most {self.max_length} (--inference-max-seq-length, "
                "--max-position-embeddings)"
            )
        if not all(0 <= token < vocab_size for token in request.prompt):
            yield f"a prompt has a token outside the vocabulary of {vocab_size}"
        if request.min_new_tokens and len(request.stop_tokens) >= vocab_size:
            yield "every token of the vocabulary is a stop token: no text can be generated"
        if request.max_new_tokens < 0:
            yield f"{request.max_new_tokens} new tokens: give 0 or more"
        if request.contexts and not self.runner.network.num_contexts(self.runner.spec):
            yield "a prompt has retrieved neighbors, and the network attends to none"
        if request.prompt_logprobs and self.runner.sees_prefix:
            yield (
                "a prefix language model has no log-probabilities of the prompt: its tokens attend "
                "to later ones"
            )

    def add(self, request: Request) -> int:
        """Add a request, which joins the batch in one of the next steps; return its id.

        Raises:
            ConfigError: it cannot be served; see `problems`.
        """
        if found := [*self.problems(request)]:
            raise ConfigError(*found)
        self._last_id += 1
        self._changes.append((self._last_id, request))
        return self._last_id

    def cancel(self, request_id: int) -> None:
        """Cancel a sequence or an exclusive request before the next step; no effect if it has ended."""
        self._changes.append((request_id, None))

    def run_alone(
        self, request: ExclusiveRequest[Found], should_continue: Callable[[], bool] = lambda: True
    ) -> list[Found]:
        """Run an exclusive request, such as a beam search, and return its results.

        Args:
            should_continue: called before each step; if False, the request is cancelled and has no
                results.

        Raises:
            ConfigError: the request is impossible, or other sequences are running.
            MegatronError: the logits are NaN or infinite.
        """
        found = [*request.problems(self)]
        if self.is_busy:
            found.append("this request runs alone: other sequences are running")
        if found:
            raise ConfigError(*found)
        self._last_id += 1
        self._changes.append((self._last_id, request))
        while self.is_busy:
            if not should_continue():
                self.cancel(self._last_id)
            self.step()
        if isinstance(self._found, MegatronError):
            raise self._found
        return self._found

    def step(self) -> list[Event]:
        """Run waiting prompts, or a chunk of one, if there are free rows, else a decode step.

        Running sequences wait for one prefill at most.

        While an exclusive request runs, nothing else does.

        Communication: all ranks of the replica, the other ranks through `follow`.
        """
        events = self._apply_changes()
        if not self._is_open:
            return events
        if self._exclusive:
            self._step_alone(self._exclusive)
            return events
        scheduler = self._scheduler
        if admitted := scheduler.admit():
            return events + self._run_prompts(admitted)
        running = scheduler.running
        if not running:
            return events
        if self.recompute:
            tokens = [one.tokens for one in running]
            features = self._prefill(running, tokens, first=0)
            return events + self._sample(running, last_of(features, tokens))
        if any(drafts := self._drafts(running)):
            return events + self._verify(running, drafts)
        features = self.runner.decode(
            [one.tokens[-1] for one in running],
            [len(one.tokens) - 1 for one in running],
            behind=scheduler.tokens_behind,
        )
        return events + self._sample(running, features[:, 0])

    def follow(self) -> None:
        """Take part in the steps of the first rank's engine until that is closed."""
        while self._is_open:
            self.step()

    def close(self) -> None:
        """End `follow` on the other ranks. Unfinished sequences are dropped."""
        if self._is_open:
            self._changes.append((_CLOSE, None))
            self._apply_changes()
            if self._draft_tokens:
                log.info("%s", self.counters)

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield the completion of each request, in their order, as soon as it is finished.

        Takes only as many requests from the iterable as keep all rows busy.
        """
        source, order = iter(requests), deque[int]()
        pending: dict[int, CompletionBuilder] = {}
        is_exhausted = False
        while True:
            while (
                not is_exhausted
                and sum(not one.is_finished for one in pending.values()) < 2 * self.rows
            ):
                request = next(source, None)
                is_exhausted = request is None
                if request is not None:
                    order.append(self.add(request))
                    pending[order[-1]] = CompletionBuilder(request.prompt)
            for event in self.step():
                pending[event.request_id].add(event)
                if event.finish_reason == "failed":
                    raise self.runner.nonfinite_logits_error()
            while order and pending[order[0]].is_finished:
                yield pending.pop(order.popleft()).build()
            if is_exhausted and not order:
                return

    def _apply_changes(self) -> list[Event]:
        """Add and cancel sequences as the first rank does; record the last step's tokens.

        Communication: one broadcast when there are several ranks.
        """
        sampled, changes = self.runner.broadcast((self._sampled, self._changes), stage=0)
        if sampled and self._unrecorded:
            self._record(self._unrecorded, sampled)
        self._sampled, self._unrecorded, self._changes = None, (), []
        events = []
        for request_id, request in changes:
            if isinstance(request, ExclusiveRequest):
                self._exclusive, self._exclusive_id = request.run(self.runner), request_id
                if self._scheduler.prefix_cache:
                    self._scheduler.prefix_cache.clear()
            elif isinstance(request, Request):
                self._scheduler.waiting.append(ActiveSequence(request_id, request))
            elif request_id == _CLOSE:
                self._is_open = False
            elif self._exclusive and request_id == self._exclusive_id:
                self._exclusive, self._found = None, []
            elif sequence := self._scheduler.find(request_id):
                self._scheduler.remove(sequence)
                events.append(
                    Event(request_id=request_id, new_token=None, finish_reason="cancelled")
                )
        return events

    def _step_alone(self, exclusive: Generator[None, None, list[Any]]) -> None:
        try:
            next(exclusive)
        except StopIteration as end:
            self._exclusive, self._found = None, end.value
        except MegatronError as error:  # on all ranks alike; the engine can run other requests
            self._exclusive, self._found = None, error
            if self.runner.states:
                self.runner.states.clear(slice(None))

    def _run_prompts(self, admitted: Sequence[ActiveSequence]) -> list[Event]:
        """Run the prompts of admitted sequences behind their cached prefixes, or a chunk of one."""
        scheduler = self._scheduler
        first = len(scheduler.running)
        starts = [one.num_cached for one in admitted]
        tokens = [scheduler.next_tokens(one) for one in admitted]
        if any(starts):
            features = self.runner.extend(tokens, starts, first, room=_room(admitted))
        else:
            features = self._prefill(admitted, tokens, first)
        for one, new in zip(admitted, tokens, strict=True):
            one.cache(len(new))
        if not scheduler.join(admitted):
            return []
        has_logprobs = admitted[0].request.prompt_logprobs
        return self._sample(
            admitted, last_of(features, tokens), features[0, :-1] if has_logprobs else None
        )

    def _prefill(
        self, sequences: Sequence[ActiveSequence], tokens: Sequence[Sequence[int]], first: int
    ) -> Tensor:
        return self.runner.prefill(
            tokens,
            [len(one.request.prompt) for one in sequences],
            first,
            contexts=[one.request.contexts for one in sequences],
            room=_room(sequences),
        )

    def _drafts(self, running: Sequence[ActiveSequence]) -> list[list[int]]:
        """Return the draft of each running sequence, which leaves room for one more token."""
        if not self._draft_tokens:
            return []
        limits = (
            (one.request.max_new_tokens - one.num_new - 1, self.max_length - len(one.tokens) - 1)
            for one in running
        )
        return [
            one.ngrams.draft(one.tokens, min(self._draft_tokens, *limit)) if one.uses_drafts else []
            for one, limit in zip(running, limits, strict=True)
        ]

    def _verify(self, running: Sequence[ActiveSequence], drafts: list[list[int]]) -> list[Event]:
        """Run the last tokens of all sequences with their drafts, and sample behind each token."""
        self.counters.add_drafts(proposed=sum(map(len, drafts)))
        features = self.runner.extend(
            [[one.tokens[-1], *draft] for one, draft in zip(running, drafts, strict=True)],
            [len(one.tokens) - 1 for one in running],
        )
        picked = [(row, i) for row, draft in enumerate(drafts) for i in range(len(draft) + 1)]
        rows, columns = to_device(picked, features.device).unbind(1)
        return self._sample(running, features[rows, columns], drafts=drafts)

    def _sample(
        self,
        sequences: Sequence[ActiveSequence],
        features: Tensor,
        of_prompt: Tensor | None = None,
        *,
        drafts: Sequence[Sequence[int]] = (),
    ) -> list[Event]:
        """Sample a token for each sequence and remove those that have ended.

        Of a draft, sequences get the tokens that are sampled, with the next one.

        Without pipeline stages, the other ranks get the tokens with the message of the next step.

        Args:
            of_prompt: hidden states before each prompt token of the first sequence from the second
                token on, [n, h], if it needs their log-probabilities.
            drafts: of each sequence, or none.

        Shapes: features [n, h], hidden states at the last position of each sequence and at those of
            its draft: the input of the head.
        """
        sequences, drafts = [*sequences], drafts or [()] * len(sequences)
        pairs = [*zip(sequences, drafts, strict=True)]
        ahead = [one.followed_by(draft[:i]) for one, draft in pairs for i in range(len(draft) + 1)]
        draws = [draw for one, draft in pairs for draw in one.draws(len(draft) + 1)]

        def sample() -> _Sampled:
            prompt_tokens: list[TokenLogprob] = []
            if of_prompt is not None and len(of_prompt):
                request = sequences[0].request
                prompt_tokens = self.runner.token_logprobs(
                    of_prompt, request.prompt[1:], top_logprobs=request.top_logprobs
                )
            tokens = next_tokens(self.runner, ahead, features, draws)
            return [*accepted_tokens(tokens, drafts)], prompt_tokens

        if self.runner.groups.topology.pipeline > 1:
            return self._record(sequences, self.runner.run_on_last_stage(sample))
        sampled = sample()
        if self.runner.groups.tensor_rank:
            self._unrecorded = sequences
            return []
        self._sampled = sampled
        return self._record(sequences, sampled)

    def _record(self, sequences: Sequence[ActiveSequence], sampled: _Sampled) -> list[Event]:
        """Append sampled tokens to their sequences; remove those that have ended."""
        new_tokens, prompt_tokens = sampled
        if not all(math.isfinite(one.logprob or 0.0) for one in prompt_tokens):
            new_tokens, prompt_tokens = [[None], *new_tokens[1:]], []
        events: list[Event] = []
        ended: list[tuple[ActiveSequence, bool]] = []
        for sequence, tokens in zip(sequences, new_tokens, strict=True):
            if not tokens:
                sequence.stop_drafts()
                self._scheduler.clear_draft(sequence)
                continue
            before = len(events)
            for new in tokens:
                event = self._append(sequence, new, () if events else tuple(prompt_tokens))
                events.append(event)
                if event.finish_reason:
                    ended.append((sequence, event.finish_reason == "failed"))
                    break
            self.counters.add_drafts(accepted=len(events) - before - 1)
        for sequence, has_failed in reversed(ended):
            self._scheduler.remove(sequence, clear_state=has_failed)
        return events

    def _append(
        self,
        sequence: ActiveSequence,
        new: TokenLogprob | None,
        prompt_tokens: tuple[TokenLogprob, ...],
    ) -> Event:
        """Append a sampled token to its sequence, if that generates; return the event."""
        generates = sequence.request.max_new_tokens > 0
        if new and generates:
            sequence.append(new.token)
        return Event(
            request_id=sequence.request_id,
            new_token=new if generates else None,
            finish_reason=sequence.finish_reason(self.tokenizer, self.max_length)
            if new
            else "failed",
            prompt_tokens=prompt_tokens,
        )


def last_of(features: Tensor, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Return the hidden state at the last token of each sequence: [b, s, h] -> [b, h]."""
    last = to_device([len(one) - 1 for one in tokens], features.device)
    return features[torch.arange(len(tokens), device=features.device), last]


def _room(sequences: Sequence[ActiveSequence]) -> int:
    """Return the most tokens that one of the sequences will have."""
    return max(len(one.request.prompt) + one.request.max_new_tokens for one in sequences)
