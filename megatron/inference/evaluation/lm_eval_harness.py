"""lm_eval's interface to a model of this framework. Needs lm_eval 0.4."""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from megatron.common.errors import DataError
from megatron.inference.engine.sampling import SamplingParams
from megatron.inference.engine.sequence import Request, cut_at_stop_string
from megatron.inference.evaluation.distributed_evaluator import DistributedEvaluator
from megatron.inference.evaluation.scoring import full_windows, last_window
from megatron.tokenizer.chat_prompt import ChatPrompts
from megatron.tokenizer.continuation import text_after
from megatron.tokenizer.special import encode_alone
from megatron.tokenizer.types.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_NEW_TOKENS = 256
"""Default limit of generated tokens, for tasks without one."""
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names that tasks use for the limit of generated tokens."""
_SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class HarnessModel(LM):
    """Scores and generates for lm_eval with a DistributedEvaluator.

    Args:
        length: most tokens of a forward pass; a longer context is cut at its beginning.
        seed: of tasks that sample.
        chat: encodes conversations, with --apply_chat_template.
    """

    def __init__(
        self,
        evaluator: DistributedEvaluator,
        tokenizer: Tokenizer,
        *,
        length: int,
        seed: int,
        chat: ChatPrompts | None = None,
    ):
        super().__init__()
        self.evaluator, self.tokenizer = evaluator, tokenizer
        self.length, self.seed, self.chat = length, seed, chat
        self._stop_tokens = {tokenizer.eod} | (chat.stop_tokens if chat else frozenset())

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding yields it."""
        windows = []
        for request in requests:
            context, continuation = self._pair(*request.args)
            if not 0 < len(continuation) <= self.length:
                raise DataError(
                    f"a task scores a continuation of {len(continuation)} tokens at once; it "
                    f"must be between 1 and --seq-length {self.length}"
                )
            windows.append(last_window(context, continuation, length=self.length))
        num_targets = sum(window.num_targets for window in windows)
        scores = self.evaluator.scores(windows, num_targets=num_targets)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-probability of each text, as the beginning of a document."""
        texts = [self._with_context(request.args[0]) for request in requests]
        parts = [[*full_windows([*begin, *tokens], length=self.length)] for begin, tokens in texts]
        every = [*chain(*parts)]
        num_targets = sum(window.num_targets for window in every)
        scores = self.evaluator.scores(every, num_targets=num_targets)
        return [sum(next(scores).log_probability for _ in windows) for windows in parts]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the continuation of each context, up to the stop strings of the task."""
        pending = [self._request(number, *request.args) for number, request in enumerate(requests)]
        cut = [most for request in requests if (most := _limit(request.args[1])) >= self.length]
        if cut:
            log.warning(
                "%d of %d requests ask for up to %d new tokens: a sequence of --seq-length %d has "
                "room for %d",
                *(len(cut), len(requests), max(cut), self.length, self.length - 1),
            )
        return [
            self._answer(request, done.tokens)
            for request, done in zip(pending, self.evaluator.completions(pending), strict=True)
        ]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation under the chat template."""
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
        # A chat template adds BOS itself.
        encode = encode_alone(self.tokenizer) if self.chat else self.tokenizer.encode
        return encode(text)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both; a space between them belongs to the continuation."""
        if not context:
            return self._with_context(continuation)
        before = context.rstrip()
        full = self._encode(context + continuation)
        tokens = self._encode(before)
        return tokens or [self.tokenizer.eod], full[len(tokens) :]

    def _with_context(self, text: str) -> tuple[list[int], list[int]]:
        """Return the context of a document and the tokens of `text`.

        The context is the token that the tokenizer adds before texts (BOS), or EOD.
        """
        begin, tokens = self._encode(""), self._encode(text)
        if begin and tokens[: len(begin)] == begin:
            return begin, tokens[len(begin) :]
        return [self.tokenizer.eod], tokens

    def _request(self, number: int, context: str, options: Mapping[str, Any]) -> Request:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else [*until]
        new = min(_limit(options), self.length - 1)
        prompt = self._encode(context) or [self.tokenizer.eod]
        return Request(
            prompt=tuple(prompt[-(self.length - new) :]),
            max_new_tokens=new,
            sampling=_sampling(options),
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
        # As in lm_eval's models: without the space that decoding drops at the beginning of a text.
        lost = max(0, len(text) - len(self.tokenizer.decode(shown)))
        return cut_at_stop_string(text, request.stop_strings)[lost:]


def _limit(options: Mapping[str, Any]) -> int:
    """Return the limit of generated tokens of a task's request."""
    limits = [options[name] for name in _LIMITS if options.get(name) is not None]
    return int(limits[0]) if limits else _NEW_TOKENS


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a task: greedy by default."""
    # Some tasks use -1 for no limit.
    given = {name: max(0, options[name]) for name in _SAMPLED if options.get(name) is not None}
    if (
        not options.get("do_sample", bool(given.get("temperature")))
        or given.get("temperature") == 0
    ):
        return SamplingParams(greedy=True, repetition_penalty=given.get("repetition_penalty", 1.0))
    return SamplingParams(**given)
