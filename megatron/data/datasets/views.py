"""What an objective makes of the samples of a data set, before any torch: prefixes, or middles."""

from collections.abc import Callable, Mapping
from functools import partial

from megatron.common.errors import DataError
from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective_plan import ObjectiveName, ObjectivePlan
from megatron.data.datasets.datasets import View
from megatron.data.datasets.fim import FimDataset, FimTokens
from megatron.data.datasets.prefix import PrefixDataset
from megatron.tokenizer.types.tokenizer import Tokenizer


def view_of(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> View | None:
    """Return what `objective` puts over a data set; None when it takes samples as they are.

    Raises:
        DataError: the tokenizer lacks a special token that is needed.
    """
    return _VIEWS[objective.name](objective, masks, tokenizer, seed)


def _fim(objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int) -> View | None:
    if not objective.fim.rate:
        return None
    return partial(
        FimDataset,
        plan=objective.fim,
        tokens=fim_tokens(objective, tokenizer),
        seed=seed,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
    )


def _prefixes(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> View | None:
    eod = tokenizer.eod if masks.isolate_documents else None
    return partial(PrefixDataset, eod=eod, seed=seed)


def _none(objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int) -> None:
    return None


_VIEWS: Mapping[ObjectiveName, Callable[..., View | None]] = {
    "gpt": _fim,
    "prefix-lm": _prefixes,
    "multitask": _none,
    "sft": _none,
}


def fim_tokens(objective: ObjectivePlan, tokenizer: Tokenizer) -> FimTokens:
    """Return the special tokens of fill-in-the-middle.

    Raises:
        DataError: lists those that the tokenizer lacks.
    """
    ids = {text: i for i, text in enumerate(tokenizer.vocabulary().tokens)}
    wanted = objective.fim.tokens
    found = {role: _first(ids, _spellings(role, name)) for role, name in wanted.items()}
    if found["pad"] is None and not wanted["pad"]:
        found["pad"] = tokenizer.special_ids.get("pad", tokenizer.eod)
    split = objective.fim.split_token
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
    """Return the texts by which a special token may be known; `name` alone if that is said."""
    usual = (f"<fim_{role}>", f"<fim-{role}>", f"<|fim_{role}|>")
    return (name,) if name else usual


def _first(ids: Mapping[str, int], texts: tuple[str, ...]) -> int | None:
    return next((ids[text] for text in texts if text in ids), None)
