"""A model here as the language model that lm_eval's tasks ask. Needs lm_eval 0.4."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from megatron.common.errors import DataError
from megatron.inference.engine.request import Request, without_stop
from megatron.inference.engine.sampling import Sampling
from megatron.inference.evaluation.distributed_evaluator import Team
from megatron.inference.evaluation.windows import full_windows, last_window
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.special import encode_alone
from megatron.tokenizer.types.tokenizer import Tokenizer

_NEW_TOKENS = 256
"""Most tokens of an answer where the task does not say."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""How tasks say it."""
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HarnessModel(LM):
    """Answers lm_eval with what the team finds.

    Args:
        length: most tokens that are read at once; of a longer context the beginning is left out.
        seed: what the draws of tasks that sample follow from.
        chat: how conversations are read, for tasks whose contexts are conversations.
    """

    def __init__(
        self,
        team: Team,
        tokenizer: Tokenizer,
        *,
        length: int,
        seed: int,
        chat: ChatPrompts | None = None,
    ):
        super().__init__()
        self.team, self.tokenizer, self.length, self.seed = team, tokenizer, length, seed
        self.chat = chat
        self._stop_tokens = {tokenizer.eod} | (chat.stop_tokens if chat else frozenset())

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the likeliest."""
        windows = []
        for request in requests:
            context, continuation = self._pair(*request.args)
            if not 0 < len(continuation) <= self.length:
                raise DataError(
                    f"a task asks for the probability of {len(continuation)} tokens at once; it "
                    f"must be between 1 and --seq-length {self.length}"
                )
            windows.append(last_window(context, continuation, length=self.length))
        return [(score.log_probability, score.is_likeliest) for score in self.team.scores(windows)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability of each text, as the beginning of a document."""
        texts = [self._begun(request.args[0]) for request in requests]
        parts = [[*full_windows([*begin, *tokens], length=self.length)] for begin, tokens in texts]
        scores = self.team.scores(window for windows in parts for window in windows)
        return [sum(next(scores).log_probability for _ in windows) for windows in parts]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return how each context goes on, up to what the task says ends an answer."""
        asked = [self._request(number, *request.args) for number, request in enumerate(requests)]
        return [
            self._answer(request, done.tokens)
            for request, done in zip(asked, self.team.completions(asked), strict=True)
        ]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the chat template writes it."""
        if self.chat is None:
            raise DataError("the model has no chat template, which conversations need")
        return self.chat.text(chat_history, continues_last=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the Jinja template, which lm_eval writes into the results."""
        return self.chat.source if self.chat and chat_template else ""

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer."""
        return self.tokenizer.name

    def _encode(self, text: str) -> list[int]:
        # A chat template writes the tokens that begin texts itself.
        encode = encode_alone(self.tokenizer) if self.chat else self.tokenizer.encode
        return encode(text)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both; a space between them belongs to the continuation."""
        if not context:
            return self._begun(continuation)
        before = context.rstrip()
        whole = self._encode(context + continuation)
        tokens = self._encode(before)
        return tokens or [self.tokenizer.eod], whole[len(tokens) :]

    def _begun(self, text: str) -> tuple[list[int], list[int]]:
        """Return what stands before a document, and the tokens of `text`.

        Before it stands the token that the tokenizer puts in front of texts, or the end of another
        document.
        """
        begin, tokens = self._encode(""), self._encode(text)
        if begin and tokens[: len(begin)] == begin:
            return begin, tokens[len(begin) :]
        return [self.tokenizer.eod], tokens

    def _request(self, number: int, context: str, wishes: Mapping[str, Any]) -> Request:
        until = wishes.get("until") or []
        stops = [until] if isinstance(until, str) else [*until]
        said = [wishes[name] for name in _LIMITS if wishes.get(name) is not None]
        new = min(int(said[0]) if said else _NEW_TOKENS, self.length - 1)
        prompt = self._encode(context) or [self.tokenizer.eod]
        return Request(
            prompt=tuple(prompt[-(self.length - new) :]),
            max_new_tokens=new,
            sampling=_sampling(wishes),
            seed=f"{self.seed}:{number}",
            stop_tokens=frozenset(self._stop_tokens),
            stop_strings=(
                *(stop for stop in stops if stop),
                *(self.chat.stop_strings if self.chat else ()),
            ),
        )

    def _answer(self, request: Request, tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token not in self._stop_tokens]
        text = text_after(self.tokenizer, request.prompt, shown)
        # As lm_eval's own models: without the blank that tokens lose where nothing precedes them.
        lost = max(0, len(text) - len(self.tokenizer.decode(shown)))
        return without_stop(text, request.stop_strings)[lost:]


def _sampling(wishes: Mapping[str, Any]) -> Sampling:
    """Return how a task wants its tokens chosen: likeliest ones, unless it says otherwise."""
    # Some say -1 for no limit.
    said = {name: max(0, wishes[name]) for name in _SAMPLED if wishes.get(name) is not None}
    if not wishes.get("do_sample", bool(said.get("temperature"))) or said.get("temperature") == 0:
        return Sampling(greedy=True, repetition_penalty=said.get("repetition_penalty", 1.0))
    return Sampling(**said)
