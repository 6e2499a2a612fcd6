"""Chat prompts: the text a model reads before it answers, and the end of its answer."""

from collections.abc import Sequence
from typing import Any

from megatron.common.errors import DataError
from megatron.tokenizer.chat import ChatTemplate
from megatron.tokenizer.special import added_tokens, encode_alone
from megatron.tokenizer.types.tokenizer import Tokenizer

_ANSWER, _NEXT = "first answer", "second question"
_PROBE = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
]


class ChatPrompts:
    """A chat template with the tokenizer that it was written for.

    Attributes:
        stop_tokens: the token that the template writes after an answer, if it is a special one.
        stop_strings: the text between an answer and the next question, if no token ends answers.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self._template = template
        self._encode = encode_alone(tokenizer)
        between = self._after_answer()
        special = added_tokens(tokenizer)
        ends = [token for token in self._encode(between) if token in special] if between else []
        self.stop_tokens = frozenset(ends[:1])
        text = between.rstrip()
        self.stop_strings = (text,) if text and not ends else ()

    def encode(self, messages: Sequence[Any]) -> list[int]:
        """Return the tokens of `messages` up to where the answer begins.

        Raises:
            DataError: the template does not accept these messages.
        """
        return self._encode(self.text(messages))

    def text(self, messages: Sequence[Any], *, continues_last: bool = False) -> str:
        """Return `messages` as the template writes them, up to where the answer begins.

        Args:
            continues_last: the last message is the beginning of the answer.

        Raises:
            DataError: the template does not accept these messages.
        """
        text, _ = self._template.render(
            messages,
            add_generation_prompt=not continues_last,
            continue_final_message=continues_last,
        )
        return text

    @property
    def source(self) -> str:
        """The Jinja template."""
        return self._template.source

    def _after_answer(self) -> str:
        """Return the text that the template writes between an answer and the next question."""
        for messages in (_PROBE, _PROBE[:2]):
            try:
                text, _ = self._template.render(messages)
            except DataError:  # a template can refuse conversations that go on
                continue
            _, answer, rest = text.partition(_ANSWER)
            if answer:
                return rest.partition(_NEXT)[0]
        return ""
