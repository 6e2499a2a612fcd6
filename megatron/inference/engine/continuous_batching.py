"""Sequences that come, grow by a token a step, and leave: many at once, each on its own terms."""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megatron.common.errors import ConfigError, MegatronError
from megatron.inference.engine.beam_search import Beam, Search, beam_search
from megatron.inference.engine.logits_processor import process_logits
from megatron.inference.engine.logprobs import choices_with_logprobs
from megatron.inference.engine.model_runner import Stage
from megatron.inference.engine.request import Choice, Completion, Event, Reason, Request
from megatron.inference.engine.sampling import choose_tokens
from megatron.inference.engine.sequence import ActiveSequence
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.types.tokenizer import Tokenizer

_CLOSE = -1
"""The number of no sequence: the engine closes."""


class Engine:
    """Continues many sequences at once; they join and leave between steps.

    With several processes all of them have an engine. That of the first of a replica is given work,
    and closed in the end; the replica's others `follow()`.

    Args:
        stage: this rank's layers.
        rows: most sequences at once.
        tokenizer: spells tokens, for requests that end with a text.
        recompute: read everything again for each token instead of keeping keys and values.
        prompt_tokens: of so many tokens, padding included, prompts are read together.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        rows: int,
        tokenizer: Tokenizer | None = None,
        recompute: bool = False,
        prompt_tokens: int = 2048,
    ):
        self.stage, self.rows, self.tokenizer = stage, rows, tokenizer
        self.recompute, self.prompt_tokens = recompute, prompt_tokens
        self.max_length = stage.max_length
        self._next_number = 0
        self._changes: list[tuple[int, Request | Search | None]] = []
        self._waiting: deque[ActiveSequence] = deque()
        self._running: list[ActiveSequence] = []  # the place of each is its row in the cache
        self._search: Generator[None, None, list[Beam]] | None = None
        self._searched = 0  # its number
        self._beams: list[Beam] | MegatronError = []
        self._is_open = True

    @property
    def is_busy(self) -> bool:
        """Whether a step would find something to do."""
        return bool(self._changes or self._waiting or self._running or self._search)

    def problems(self, request: Request) -> Iterator[str]:
        """Yield every reason why a request cannot be taken."""
        length = len(request.prompt)
        room = self.max_length - (1 if request.max_new_tokens else 0)
        if not 0 < length <= room:
            yield (
                f"a prompt has {length} tokens; it needs at least 1 and at most {room}: there is room "
                f"for {self.max_length} (--inference-max-seq-length, --max-position-embeddings)"
            )
        if not all(0 <= token < self.stage.spec.vocab_size for token in request.prompt):
            yield f"a prompt has a token outside the vocabulary of {self.stage.spec.vocab_size}"
        if request.min_new_tokens and len(request.stop_tokens) >= self.stage.spec.vocab_size:
            yield "every token of the vocabulary is a stop token: no text can be generated"
        if request.max_new_tokens < 0:
            yield f"{request.max_new_tokens} new tokens: give 0 or more"
        if request.prompt_logprobs and self.stage.sees_prefix:
            yield (
                "the tokens of a prompt have no probabilities in a prefix language model: each "
                "sees those behind it"
            )

    def add(self, request: Request) -> int:
        """Take a request, which joins in one of the next steps; return its number.

        Raises:
            ConfigError: it cannot be taken; see `problems`.
        """
        if found := [*self.problems(request)]:
            raise ConfigError(*found)
        self._next_number += 1
        self._changes.append((self._next_number, request))
        return self._next_number

    def cancel(self, number: int) -> None:
        """Let a sequence or a search end with the next step; what has ended is left as it is."""
        self._changes.append((number, None))

    def search(self, search: Search, goes_on: Callable[[], bool] = lambda: True) -> list[Beam]:
        """Return the likeliest continuations of a prompt; see `beam_search`.

        Args:
            goes_on: asked before each token; nothing is found when it is not True.

        Raises:
            ConfigError: it cannot be done, or other sequences are under way.
            MegatronError: the network gives no numbers for a token.
        """
        request = Request(prompt=search.prompt, max_new_tokens=max(1, search.max_new_tokens))
        found = [*self.problems(request)]
        if not 1 <= search.width <= self.rows or not self.stage.cache:
            found.append(
                f"a beam width of {search.width} must be between 1 and the {self.rows} sequences "
                "that have room for keys and values (--micro-batch-size, without --recompute)"
            )
        if self.is_busy:
            found.append("a beam search runs alone: other sequences are under way")
        if found:
            raise ConfigError(*found)
        self._next_number += 1
        self._changes.append((self._next_number, search))
        while self.is_busy:
            if not goes_on():
                self.cancel(self._next_number)
            self.step()
        if isinstance(self._beams, MegatronError):
            raise self._beams
        return self._beams

    def step(self) -> list[Event]:
        """Read waiting prompts if there is room for them, else add a token to every sequence.

        A search is alone, and a step of it adds a token to each of its beams.

        Communication: all ranks of the model take part, the others through `follow`.
        """
        events = self._changed()
        if not self._is_open:
            return events
        if self._search:
            try:
                next(self._search)
            except StopIteration as end:
                self._search, self._beams = None, end.value
            except MegatronError as error:  # the same on all ranks, which go on to other work
                self._search, self._beams = None, error
                self._forget(slice(None))
            return events
        if self._waiting and len(self._running) < self.rows:
            joined = self._joining()
            features = self._read(joined, first=len(self._running))
            self._running += joined
            return events + self._chosen(joined, features, of_prompts=True)
        if not self._running:
            return events
        if self.recompute:
            return events + self._chosen(self._running, self._read(self._running, first=0))
        features = self.stage.go_on(
            [s.tokens[-1] for s in self._running], [len(s.tokens) - 1 for s in self._running]
        )
        return events + self._chosen(self._running, features, is_last=True)

    def follow(self) -> None:
        """Take part in what the first rank's engine does until that is closed."""
        while self._is_open:
            self.step()

    def close(self) -> None:
        """Let the other ranks go. What has not ended is dropped."""
        if self._is_open:
            self._changes.append((_CLOSE, None))
            self._changed()

    def complete(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield what becomes of each request, in their order, as soon as it is known.

        So many are taken that all rows are busy, and no more are held.
        """
        source, order = iter(requests), deque[int]()
        asked: dict[int, Request] = {}
        chosen: dict[int, list[Choice]] = {}
        before: dict[int, tuple[Choice, ...]] = {}
        ended: dict[int, Reason] = {}
        is_over = False
        while True:
            while not is_over and len(asked) - len(ended) < 2 * self.rows:
                request = next(source, None)
                is_over = request is None
                if request is not None:
                    number = self.add(request)
                    order.append(number)
                    asked[number], chosen[number] = request, []
            for event in self.step():
                if event.choice:
                    chosen[event.number].append(event.choice)
                if event.prompt_choices:
                    before[event.number] = event.prompt_choices
                if event.reason == "failed":
                    raise self.stage.no_numbers()
                if event.reason:
                    ended[event.number] = event.reason
            while order and order[0] in ended:
                number = order.popleft()
                choices = tuple(chosen.pop(number))
                yield Completion(
                    prompt=asked.pop(number).prompt,
                    tokens=tuple(choice.token for choice in choices),
                    reason=ended.pop(number),
                    choices=choices,
                    prompt_choices=before.pop(number, ()),
                )
            if is_over and not order:
                return

    def _changed(self) -> list[Event]:
        """Let sequences come and go as the first rank says.

        Communication: one broadcast when there are several ranks.
        """
        changes, self._changes = self._changes, []
        changes = self.stage.shared(changes, stage=0)
        events = []
        for number, asked in changes:
            if isinstance(asked, Search):
                self._search, self._searched = beam_search(self.stage, asked), number
            elif isinstance(asked, Request):
                self._waiting.append(ActiveSequence(number, asked))
            elif number == _CLOSE:
                self._is_open = False
            elif self._search and number == self._searched:
                self._search, self._beams = None, []
            elif sequence := self._found(number):
                self._leave(sequence)
                events.append(Event(number=number, choice=None, reason="cancelled"))
        return events

    def _found(self, number: int) -> ActiveSequence | None:
        return next((s for s in (*self._running, *self._waiting) if s.number == number), None)

    def _joining(self) -> list[ActiveSequence]:
        """Take from those that wait as many as are read together."""
        joined: list[ActiveSequence] = []
        longest = 0
        while self._waiting and len(self._running) + len(joined) < self.rows:
            longest = max(longest, len(self._waiting[0].tokens))
            if joined and (
                longest * (len(joined) + 1) > self.prompt_tokens
                or self._waiting[0].request.prompt_logprobs
                or joined[0].request.prompt_logprobs
            ):
                break
            joined.append(self._waiting.popleft())
        return joined

    def _read(self, sequences: Sequence[ActiveSequence], first: int) -> Tensor:
        prefixes = [len(s.request.prompt) for s in sequences]
        return self.stage.read([s.tokens for s in sequences], prefixes, first)

    def _chosen(
        self,
        sequences: Sequence[ActiveSequence],
        features: Tensor,
        *,
        of_prompts: bool = False,
        is_last: bool = False,
    ) -> list[Event]:
        """Choose a token for each sequence and let those leave that have ended.

        Args:
            features: what the head makes logits of, [b, s, h].
            of_prompts: whether the sequences have just been read.
            is_last: whether `features` are those of the last positions alone.
        """
        sequences = [*sequences]
        draws = [
            0.0 if s.request.sampling.takes_likeliest else s.stream.random() for s in sequences
        ]

        def decide() -> tuple[list[Choice | None], list[Choice]]:
            before: list[Choice] = []
            first = sequences[0]
            if of_prompts and first.request.prompt_logprobs and len(first.tokens) > 1:
                before = self.stage.prompt_choices(
                    features[0, :-1], first.tokens[1:], top_logprobs=first.request.top_logprobs
                )
            if is_last:
                return self._choices(sequences, features[:, 0], draws), before
            last = torch.tensor([len(s.tokens) - 1 for s in sequences], device=features.device)
            rows = torch.arange(len(sequences), device=features.device)
            return self._choices(sequences, features[rows, last], draws), before

        choices, before = self.stage.decided(decide)
        if not all(math.isfinite(choice.logprob or 0.0) for choice in before):
            choices[0], before = None, []
        events = []
        for place, (sequence, choice) in enumerate(zip(sequences, choices, strict=True)):
            wants_none = sequence.request.max_new_tokens == 0
            if choice and not wants_none:
                sequence.tokens.append(choice.token)
            reason = self._end(sequence) if choice else "failed"
            events.append(
                Event(
                    number=sequence.number,
                    choice=None if wants_none else choice,
                    reason=reason,
                    prompt_choices=tuple(before) if place == 0 else (),
                )
            )
        for sequence, event in reversed([*zip(sequences, events, strict=True)]):
            if event.reason == "failed":
                row = self._running.index(sequence)
                self._forget(slice(row, row + 1))
            if event.reason:
                self._leave(sequence)
        return events

    def _forget(self, rows: slice) -> None:
        if self.stage.cache:
            self.stage.cache.clear(rows)

    @torch.inference_mode()
    def _choices(
        self, sequences: Sequence[ActiveSequence], features: Tensor, draws: Sequence[float]
    ) -> list[Choice | None]:
        """Return what is chosen for each sequence; None where there are no numbers to choose by."""
        logits = self.stage.logits(features)
        is_finite = logits.isfinite().all(1)
        logits = logits.where(is_finite[:, None], 0.0)
        tokens = choose_tokens(
            process_logits(logits, sequences),
            [s.request.sampling for s in sequences],
            draws,
            [s.num_new for s in sequences],
        )
        choices = [
            Choice(token=token) if is_known else None
            for token, is_known in zip(tokens, is_finite.tolist(), strict=True)
        ]
        with_logprobs = [
            i
            for i, s in enumerate(sequences)
            if choices[i] and (s.request.logprobs or s.request.top_logprobs)
        ]
        if not with_logprobs:
            return choices
        found = choices_with_logprobs(
            logits[with_logprobs].log_softmax(-1),
            [tokens[i] for i in with_logprobs],
            [sequences[i].request.top_logprobs for i in with_logprobs],
        )
        for i, choice in zip(with_logprobs, found, strict=True):
            choices[i] = choice
        return choices

    def _end(self, sequence: ActiveSequence) -> Reason | None:
        request = sequence.request
        if sequence.num_new > request.min_new_tokens:
            if sequence.tokens[-1] in request.stop_tokens:
                return "stop"
            if request.stop_strings and self.tokenizer:
                # A token spells one byte at least, or a part of a character.
                reach = max(len(text.encode()) for text in request.stop_strings) + 4
                earliest = len(request.prompt) + request.min_new_tokens
                begin = max(earliest, len(sequence.tokens) - reach)
                before, new = sequence.tokens[begin - 1 : begin], sequence.tokens[begin:]
                spelled = text_after(self.tokenizer, before, new)
                if any(text in spelled for text in request.stop_strings):
                    return "stop"
        if sequence.num_new >= request.max_new_tokens or len(sequence.tokens) >= self.max_length:
            return "length"
        return None

    def _leave(self, sequence: ActiveSequence) -> None:
        """Take a sequence out; the last one's row moves into the gap."""
        if sequence not in self._running:
            self._waiting.remove(sequence)
            return
        row, last = self._running.index(sequence), self._running.pop()
        if last is not sequence:
            self._running[row] = last
            if self.stage.cache:
                self.stage.cache.copy(len(self._running), row, len(last.tokens))
