"""Choices of OpenAI's responses: text and token log-probabilities, complete or as stream deltas."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.inference.engine.sequence import Completion, Event, FinishReason
from megatron.inference.loading.detokenizer import Detokenizer, IncrementalDetokenizer, TokenOffsets
from megatron.inference.runner.logprobs import TokenLogprob
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt's tokens, and its text for `echo`."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """A token with its log-probability and text.

    Args:
        before: the preceding token; empty for the first of a text.
        text: decoded in its context.
        offset: index of its first character.
    """

    scored: TokenLogprob
    before: tuple[int, ...]
    text: str
    offset: int

    def top(self, tokenizer: Tokenizer) -> list[tuple[int, str, float]]:
        """Return id, text and log-probability of the most likely tokens, and of this one."""
        top, scored = self.scored.top, self.scored
        if scored.logprob is not None and all(i != scored.token for i, _ in top):
            top = (*top, (scored.token, scored.logprob))
        return [(i, text_after(tokenizer, self.before, [i]), value) for i, value in top]


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Stable text and tokens since the last delta; `finish_reason` is None except for the last."""

    text: str
    tokens: Sequence[TokenRecord] = ()
    finish_reason: FinishReason | None = None


class ChoiceBuilder:
    """Builds the deltas of one choice; a token is in the delta with its first character.

    Args:
        echo: prepend the prompt and its tokens.
        with_tokens: record tokens; else deltas have text alone.
        with_stop_token: record the stop token too, which has no text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        prompt: Prompt,
        *,
        echo: bool,
        with_tokens: bool,
        with_stop_token: bool,
    ):
        self._detokenizer, self._prompt = detokenizer, prompt
        self._with_tokens, self._with_stop_token = with_tokens, with_stop_token
        self._echo = prompt.text if echo else ""
        self._echoes = echo
        self._length = 0  # characters in all deltas so far
        self._stream = IncrementalDetokenizer(detokenizer, prompt.tokens)
        self._held: list[TokenRecord] = []
        self._has_begun = False
        self._last = prompt.tokens[-1:]
        self._offsets = TokenOffsets(
            detokenizer.tokenizer,
            prompt.tokens,
            hidden=detokenizer.hidden_tokens | detokenizer.stop_tokens,
            start=len(self._echo),
        )

    def add(self, event: Event) -> Delta:
        """Add an event; return the text that has become stable."""
        token = event.new_token.token if event.new_token else None
        text = self._begin(event.prompt_tokens)
        text += self._stream.add(token, is_last=event.finish_reason is not None)
        if event.new_token:
            self._record(event.new_token)
        return self._delta(text, event.finish_reason)

    def complete(self, done: Completion) -> Delta:
        """Return a finished completion as a single delta."""
        text = self._begin(done.prompt_tokens)
        for scored in done.new_tokens:
            self._record(scored)
        full_text, self._stream.is_cut = self._detokenizer.text_and_cut(done.prompt, done.tokens)
        return self._delta(text + full_text, done.finish_reason)

    def _begin(self, prompt_tokens: Sequence[TokenLogprob]) -> str:
        if self._has_begun:
            return ""
        self._has_begun = True
        if self._echoes and self._with_tokens:
            self._held += self._prompt_records(prompt_tokens)
        return self._echo

    def _prompt_records(self, scored: Sequence[TokenLogprob]) -> list[TokenRecord]:
        tokenizer, tokens = self._detokenizer.tokenizer, self._prompt.tokens
        # The text of a prompt lacks the special tokens that the tokenizer adds.
        is_literal = tokenizer.decode(tokens) == self._prompt.text
        offsets = TokenOffsets(
            tokenizer, hidden=() if is_literal else frozenset(tokenizer.special_ids.values())
        )
        found = []
        before: tuple[int, ...] = ()
        for one in (TokenLogprob(token=tokens[0]), *scored):
            text, offset = offsets.add(one.token)
            offset = min(offset, len(self._echo))
            found.append(TokenRecord(scored=one, before=before, text=text, offset=offset))
            before = (one.token,)
        return found

    def _record(self, scored: TokenLogprob) -> None:
        if not self._with_tokens:
            return
        if scored.token in self._detokenizer.stop_tokens and not self._with_stop_token:
            return
        text, offset = self._offsets.add(scored.token)
        self._held.append(TokenRecord(scored=scored, before=self._last, text=text, offset=offset))
        self._last = (scored.token,)

    def _delta(self, text: str, finish_reason: FinishReason | None) -> Delta:
        self._length += len(text)
        shown = [record for record in self._held if record.offset < self._length]
        if finish_reason is None:
            self._held = [record for record in self._held if record.offset >= self._length]
        elif not self._stream.is_cut:
            shown, self._held = self._held, []
        return Delta(text=text, tokens=shown, finish_reason=finish_reason)
