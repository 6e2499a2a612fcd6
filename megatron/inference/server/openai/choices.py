"""What a client gets of one continuation: its text, and a record of each token that it has."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.inference.engine.request import Choice, Completion, Event, Reason
from megatron.inference.loading.incremental_detokenizer import Parts, Spelling, TokenTexts
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt and its text, which is repeated with `echo`."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TokenRecord:
    """A token with its log-probability.

    Args:
        before: the token in front of it; empty for the first of a text.
        text: its own, where it stands.
        offset: the character at which it begins.
    """

    choice: Choice
    before: tuple[int, ...]
    text: str
    offset: int

    def likeliest(self, tokenizer: Tokenizer) -> list[tuple[int, str, float]]:
        """Return id, text and log-probability of the likeliest tokens, and of this one."""
        top = self.choice.top
        if self.choice.logprob is not None and all(i != self.choice.token for i, _ in top):
            top = (*top, (self.choice.token, self.choice.logprob))
        return [(i, text_after(tokenizer, self.before, [i]), value) for i, value in top]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What became certain of a continuation; `reason` says why it has ended, if it has."""

    text: str
    tokens: Sequence[TokenRecord] = ()
    reason: Reason | None = None


class ChoiceWriter:
    """Turns tokens into parts: a token is in the part that has the beginning of its text.

    Args:
        echo: repeat the prompt, and its tokens, in front.
        with_tokens: record tokens; else parts have text alone.
        with_stop_token: record the token that ended the text, which has no text, too.
    """

    def __init__(
        self,
        spelling: Spelling,
        prompt: Prompt,
        *,
        echo: bool,
        with_tokens: bool,
        with_stop_token: bool,
    ):
        self._spelling, self._prompt = spelling, prompt
        self._with_tokens, self._with_stop_token = with_tokens, with_stop_token
        self._echo = prompt.text if echo else ""
        self._echoes = echo
        self._length = 0  # characters in the parts until here
        self._parts = Parts(spelling, prompt.tokens)
        self._held: list[TokenRecord] = []
        self._has_begun = False
        self._last = prompt.tokens[-1:]
        self._texts = TokenTexts(
            spelling.tokenizer,
            prompt.tokens,
            hidden=spelling.hidden_tokens | spelling.stop_tokens,
            start=len(self._echo),
        )

    def after(self, event: Event) -> Part:
        """Return what is certain after one more token."""
        token = event.choice.token if event.choice else None
        text = self._begin(event.prompt_choices)
        text += self._parts.after(token, is_last=event.reason is not None)
        if event.choice:
            self._record(event.choice)
        return self._part(text, event.reason)

    def whole(self, done: Completion) -> Part:
        """Return a continuation that has ended."""
        text = self._begin(done.prompt_choices)
        for choice in done.choices:
            self._record(choice)
        own, self._parts.is_cut = self._spelling.text_and_cut(done.prompt, done.tokens)
        return self._part(text + own, done.reason)

    def _begin(self, prompt_choices: Sequence[Choice]) -> str:
        if self._has_begun:
            return ""
        self._has_begun = True
        if self._echoes and self._with_tokens:
            self._held += self._prompt_records(prompt_choices)
        return self._echo

    def _prompt_records(self, choices: Sequence[Choice]) -> list[TokenRecord]:
        tokenizer, tokens = self._spelling.tokenizer, self._prompt.tokens
        # A text prompt does not have the text of special tokens that the tokenizer adds.
        is_literal = tokenizer.decode(tokens) == self._prompt.text
        texts = TokenTexts(
            tokenizer, hidden=() if is_literal else frozenset(tokenizer.special_ids.values())
        )
        found = []
        before: tuple[int, ...] = ()
        for choice in (Choice(token=tokens[0]), *choices):
            text, offset = texts.after(choice.token)
            offset = min(offset, len(self._echo))
            found.append(TokenRecord(choice=choice, before=before, text=text, offset=offset))
            before = (choice.token,)
        return found

    def _record(self, choice: Choice) -> None:
        if not self._with_tokens:
            return
        if choice.token in self._spelling.stop_tokens and not self._with_stop_token:
            return
        text, offset = self._texts.after(choice.token)
        self._held.append(TokenRecord(choice=choice, before=self._last, text=text, offset=offset))
        self._last = (choice.token,)

    def _part(self, text: str, reason: Reason | None) -> Part:
        self._length += len(text)
        shown = [record for record in self._held if record.offset < self._length]
        if reason is None:
            self._held = [record for record in self._held if record.offset >= self._length]
        elif not self._parts.is_cut:
            shown, self._held = self._held, []
        return Part(text=text, tokens=shown, reason=reason)
