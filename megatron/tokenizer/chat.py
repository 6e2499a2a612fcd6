"""Chat templates: conversations as tokens, with a loss mask on the answers."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from megatron.common.errors import DataError, WrongDataError, reason
from megatron.tokenizer.types.hugging_face import load_with_transformers
from megatron.tokenizer.types.tokenizer import Tokenizer, Vocabulary, no_tokens

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NO_CHAT = (
    'give {"messages": [{"role": ..., "content": ...}]} or {"prompt": ..., "completion": ...}'
)
Span = tuple[int, int]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template of transformers', and the named texts it may use.

    Args:
        source: the template; "" if there is none, for prompts and completions alone.
        names: special tokens, such as eos_token.
    """

    source: str = ""
    names: tuple[tuple[str, str], ...] = ()

    def render(self, messages: Sequence[Any], **variables: Any) -> tuple[str, list[Span]]:
        """Return the text of `messages`, and where in it the marked answers are.

        Raises:
            DataError: the template does not take these messages.
        """
        # Imported here: it takes seconds, and texts without messages do not need it.
        from jinja2 import TemplateSyntaxError
        from transformers.utils import chat_template_utils

        from megatron.tokenizer.bounded_jinja import BoundedEnvironment, limits, require_short

        # Templates are compiled for this sandbox: transformers' has no limits.
        theirs: Any = chat_template_utils  # its type hints are wrong
        theirs.ImmutableSandboxedEnvironment = BoundedEnvironment
        try:
            with limits():
                (text,), spans = theirs.render_jinja_template(
                    [list(messages)],
                    chat_template=self.source,
                    return_assistant_tokens_mask=self.is_marked,
                    **dict(self.names),
                    **variables,
                )
            require_short(text)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not Jinja: line {error.lineno}: {error.message}; correct "
                "--chat-template, or the tokenizer's own"
            ) from error
        except Exception as error:  # a template raises what it likes
            raise DataError(f"the chat template refuses these messages: {error}") from error
        return text, list(spans[0]) if spans else []

    @property
    def is_marked(self) -> bool:
        """Whether the template itself marks the answers."""
        return bool(_MARKED.search(self.source))


def read_chat_template(
    file: str | None, tokenizer: str | None, kwargs: Mapping[str, Any] = MappingProxyType({})
) -> ChatTemplate:
    """Return the template in `file`, or else the tokenizer's template.

    Args:
        tokenizer: a directory of Hugging Face's tokenizer, or its name on the hub.
        kwargs: more arguments for `AutoTokenizer.from_pretrained`.

    Raises:
        DataError: the file cannot be read, or the tokenizer cannot be loaded.
    """
    source, names = _template_of(tokenizer, kwargs) if tokenizer else ("", {})
    if file:
        try:
            source = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WrongDataError(
                f"cannot read --chat-template {file}: {reason(error, file)}"
            ) from error
    return ChatTemplate(source, tuple(sorted(names.items())))


def _template_of(tokenizer: str, kwargs: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    folder = Path(tokenizer)
    if not (folder / "tokenizer_config.json").is_file():
        loaded = load_with_transformers(tokenizer, kwargs)
        return _default(loaded.chat_template), dict(loaded.special_tokens_map)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    names = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, dict | str)
    }
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8"), names
    return _default(config.get("chat_template")), names


def _default(templates: Any) -> str:
    """Return the template of a tokenizer that may have several, each with a name."""
    if isinstance(templates, list):
        templates = {each["name"]: each["template"] for each in templates}
    return (templates.get("default", "") if isinstance(templates, dict) else templates) or ""


class ChatTokenizer(Tokenizer):
    """A tokenizer with a template of conversations.

    Args:
        tokenizer: one of the `tokenizers` library, which gives the position of each token in a text.

    Raises:
        DataError: the tokenizer is of another library.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        tokenizer = getattr(tokenizer, "reference", tokenizer)  # the full one of a fast one
        backend = getattr(tokenizer, "backend", None)
        if backend is None:
            raise DataError(
                f"--conversations: the tokenizer {tokenizer.name} does not give the positions of its "
                "tokens stand; use PretrainedFromHF with a tokenizer.json, or GPT2BPETokenizer"
            )
        self.name, self.hint = tokenizer.name, tokenizer.hint
        self.vocab_size, self.special_ids = tokenizer.vocab_size, tokenizer.special_ids
        self._tokenizer, self._template = tokenizer, template
        self._backend = Backend.from_str(backend.to_str())
        # It would add tokens that the template has, and leave white space out of positions.
        self._backend.post_processor = None
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return self._tokenizer.decode(ids)

    def vocabulary(self) -> Vocabulary:
        """Return the properties that the tokenizer is compared by."""
        return self._tokenizer.vocabulary()

    def encode_conversation(self, line: Any) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of a conversation and its loss mask, true for the tokens of answers.

        Args:
            line: an object with `messages`, and `tools` if there are any; or with `prompt` and
                `completion`, two texts that follow each other as they are.

        Raises:
            DataError: it is neither, or start and end of an answer cannot be found.
        """
        text, answers = self._text_of(line)
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except Exception as error:  # the library defines no exception type
            raise no_tokens(self.name, text, error) from error
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        counts = np.zeros(len(offsets), np.bool_)
        for start, stop in answers:
            for edge in (start, stop):
                across = (offsets[:, 0] < edge) & (edge < offsets[:, 1])
                if across.any():
                    first, last = offsets[across][0]
                    raise DataError(
                        f"the token {text[first:last]!r} is partly of an answer and partly not; "
                        "move the white space between them to the other side, or mark the answer "
                        "otherwise"
                    )
            inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= stop) & (offsets[:, 0] < stop)
            if not inside.any():
                raise DataError(f"the answer {text[start:stop]!r} has no token of its own")
            counts |= inside
        return np.array(encoding.ids, np.int32), counts

    def _text_of(self, line: Any) -> tuple[str, list[Span]]:
        if not isinstance(line, dict):
            raise DataError(f"not a JSON object; {_NO_CHAT}")
        if "messages" in line:
            return self._render(line["messages"], line.get("tools") or None)
        texts = [line.get("prompt"), line.get("completion")]
        if not all(isinstance(text, str) for text in texts):
            present = ", ".join(map(repr, line)) or "nothing"
            raise DataError(f"neither messages nor two texts; it has {present}; {_NO_CHAT}")
        prompt, completion = map(str, texts)
        if not completion:
            raise DataError("the completion is empty: there is nothing to learn")
        return prompt + completion, [(len(prompt), len(prompt + completion))]

    def _render(self, messages: Any, tools: Any) -> tuple[str, list[Span]]:
        if not self._template.source:
            raise DataError(
                f"the tokenizer {self.name} has no chat template; name a file of Jinja with "
                "--chat-template"
            )
        require_messages(messages)
        answers = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        if not answers:
            raise DataError("no message has the role assistant: there is nothing to learn")
        text, spans = self._template.render(messages, tools=tools)
        if not self._template.is_marked:
            return text, [*self._answer_spans(messages, answers, text, tools)]
        if len(spans) != len(answers) or any(start >= stop for start, stop in spans):
            raise DataError(
                f"the chat template marks {len(spans)} answers as {{% generation %}}, some maybe "
                f"empty, and there are {len(answers)} messages of the role assistant"
            )
        return text, spans

    def _answer_spans(
        self, messages: Sequence[Any], answers: Sequence[int], text: str, tools: Any
    ) -> Iterator[Span]:
        """Yield the text that each answer adds to the messages before it."""
        for i in answers:
            before, _ = self._template.render(messages[:i], tools=tools, add_generation_prompt=True)
            after, _ = self._template.render(messages[: i + 1], tools=tools)
            if not (text.startswith(after) and after.startswith(before) and before != after):
                raise DataError(
                    f"message {i + 1}: the chat template writes what is before this answer "
                    "differently once it is there, so its start and end cannot be found; "
                    "put {% generation %} and {% endgeneration %} around answers in a template of "
                    "your own, --chat-template"
                )
            yield len(before), len(after)


def require_messages(messages: Any) -> None:
    """Raise DataError unless `messages` is a list of objects with a role and content."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages is {messages!r:.80}, not a list of at least one; {_NO_CHAT}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} is no object with a role: {message!r:.80}")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise DataError(f"message {number} has no text as content: {message!r:.80}")
