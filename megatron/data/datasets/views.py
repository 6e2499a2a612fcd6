"""Dataset wrappers of objectives, by name and without torch: prefixes, and fill-in-the-middle."""

from collections.abc import Callable, Mapping
from functools import partial

from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectiveName, ObjectivePlan
from megatron.data.datasets.datasets import View
from megatron.data.datasets.fim import FimDataset, fim_tokens
from megatron.data.datasets.prefix import PrefixDataset
from megatron.tokenizer.types.tokenizer import Tokenizer


def view_of(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> View | None:
    """Return the view by which `objective` wraps a dataset; None when it takes plain samples.

    Raises:
        DataError: the tokenizer lacks a special token that is needed.
    """
    view = _VIEWS.get(objective.name)
    return view(objective, masks, tokenizer, seed) if view else None


def _fim(objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int) -> View | None:
    if not objective.fim.rate:
        return None
    return partial(
        FimDataset,
        plan=objective.fim,
        tokens=fim_tokens(objective.fim, tokenizer),
        seed=seed,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
    )


def _prefixes(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> View | None:
    eod = tokenizer.eod if masks.isolate_documents else None
    return partial(PrefixDataset, eod=eod, seed=seed)


_VIEWS: Mapping[ObjectiveName, Callable[..., View | None]] = {"gpt": _fim, "prefix-lm": _prefixes}
