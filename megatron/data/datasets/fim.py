"""Fill-in-the-middle: documents of a sample rearranged so that their middle comes last.

Source: arXiv:2207.14255; the parts are ordered as in StarCoder (arXiv:2305.06161).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.common.errors import DataError
from megatron.config.data.objective import FimPlan
from megatron.data.sampling.provenance import OneToOne, TracedSource
from megatron.data.sampling.sample_rng import sample_rng
from megatron.tokenizer.types.tokenizer import Tokenizer

_LOST = "\ufffd"  # stands for tokens that are incomplete characters, or not text at all


@dataclass(frozen=True)
class FimTokens:
    """Ids of the special tokens; `split` is None where documents are not cut into fragments."""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None


class FimDataset(OneToOne):
    """Samples of another data set with some of their documents rearranged.

    A sample keeps its length: special tokens push its end out, and where text became shorter in
    other tokens, padding fills it up. Documents are the tokens between two ends of documents,
    so the first and the last may be parts.

    Args:
        encode: text to token ids.
        decode: token ids to text, U+FFFD where they are none.

    Shapes: dataset[i] -> {"tokens": [s + 1] int64}, as in `dataset`.
    Randomness: from the stream of the sample.
    """

    def __init__(
        self,
        dataset: TracedSource,
        *,
        plan: FimPlan,
        tokens: FimTokens,
        seed: int,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
    ):
        super().__init__(dataset)
        self._plan = plan
        self._tokens = tokens
        self._seed = seed
        self._encode = encode
        self._decode = decode

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        tokens = self.dataset[i]["tokens"]
        found = self.rearrange(tokens, sample_rng(self._seed, i))
        row = np.full(len(tokens), self._tokens.pad, np.int64)
        row[: len(found)] = found[: len(tokens)]
        return {"tokens": row}

    def rearrange(self, tokens: NDArray, rng: np.random.RandomState) -> NDArray:
        """Return the documents of `tokens`, some of them rearranged, at their new length."""
        parts = _cut_behind(tokens, self._tokens.eod)
        return np.concatenate([part for d in parts for part in self._document(d, rng)])

    def _document(self, tokens: NDArray, rng: np.random.RandomState) -> Iterator[NDArray]:
        """Yield the parts of a document, whose end, if it is there, stays where it is."""
        body, end = _without_last(tokens, self._tokens.eod)
        fragments = _cut_behind(body, self._tokens.split)
        if not len(body) or rng.random_sample() >= self._plan.rate:
            yield body
        elif len(fragments) == 1:
            yield from self._fragment(body, rng)
        else:
            for fragment in fragments:
                text, separator = _without_last(fragment, self._tokens.split)
                if len(text) and rng.random_sample() < self._plan.fragment_rate:
                    yield from self._fragment(text, rng)
                else:
                    yield text
                yield separator
        yield end

    def _fragment(self, tokens: NDArray, rng: np.random.RandomState) -> list[NDArray]:
        """Return the parts of a fragment in their new order, the middle last."""
        plan, special = self._plan, self._tokens
        as_text = plan.cut == "characters"
        text = self._decode(tokens.tolist()) if as_text or plan.skipped_prefix else ""
        if plan.skipped_prefix and text.startswith(plan.skipped_prefix):
            return [tokens]
        if as_text and _LOST not in text:
            first, second = sorted(rng.randint(0, len(text) + 1, size=2).tolist())
            texts = (text[:first], text[first:second], text[second:])
            prefix, middle, suffix = (np.array(self._encode(t), np.int64) for t in texts)
        else:
            first, second = sorted(rng.randint(0, len(tokens) + 1, size=2).tolist())
            prefix, middle, suffix = np.split(tokens, [first, second])
        marks = {
            role: np.array([getattr(special, role)]) for role in ("prefix", "middle", "suffix")
        }
        if rng.random_sample() < plan.spm_rate:
            return [marks["prefix"], marks["suffix"], suffix, marks["middle"], prefix, middle]
        return [marks["prefix"], prefix, marks["suffix"], suffix, marks["middle"], middle]


def _cut_behind(tokens: NDArray, mark: int | None) -> list[NDArray]:
    """Return `tokens` cut after every `mark`; uncut where there is none."""
    if mark is None:
        return [tokens]
    parts = np.split(tokens, np.flatnonzero(tokens == mark) + 1)
    return parts if len(parts[-1]) or len(parts) == 1 else parts[:-1]


def _without_last(tokens: NDArray, mark: int | None) -> tuple[NDArray, NDArray]:
    """Return `tokens` without the `mark` that they may end with, and that."""
    length = len(tokens) - int(len(tokens) > 0 and tokens[-1] == mark)
    return tokens[:length], tokens[length:]


def fim_tokens(plan: FimPlan, tokenizer: Tokenizer) -> FimTokens:
    """Return the special tokens of fill-in-the-middle.

    Raises:
        DataError: lists those that the tokenizer lacks.
    """
    ids = {text: i for i, text in enumerate(tokenizer.vocabulary().tokens)}
    wanted = plan.tokens
    found = {role: _first(ids, _spellings(role, name)) for role, name in wanted.items()}
    if found["pad"] is None and not wanted["pad"]:
        found["pad"] = tokenizer.special_ids.get("pad", tokenizer.eod)
    split = plan.split_token
    problems = [
        f"{' or '.join(_spellings(role, wanted[role]))} (--fim-{role}-token)"
        for role, i in found.items()
        if i is None
    ]
    if split and split not in ids:
        problems.append(f"{split} (--fim-split-sample)")
    if problems:
        raise DataError(
            f"the tokenizer {tokenizer.name} has no token {', no token '.join(problems)}, which "
            "fill-in-the-middle needs; add it to the vocabulary, or name with the flag a token "
            "that has no other use"
        )
    known = {role: i for role, i in found.items() if i is not None}
    return FimTokens(**known, eod=tokenizer.eod, split=ids[split] if split else None)


def _spellings(role: str, name: str) -> tuple[str, ...]:
    """Return the usual spellings of a FIM special token; `name` alone if it is given."""
    usual = (f"<fim_{role}>", f"<fim-{role}>", f"<|fim_{role}|>")
    return (name,) if name else usual


def _first(ids: Mapping[str, int], texts: tuple[str, ...]) -> int | None:
    return next((ids[text] for text in texts if text in ids), None)
