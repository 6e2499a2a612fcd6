"""Views of samples that objectives declare, built without torch: prefixes, fill-in-the-middle."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from megatron.config.data.masks import MaskPlan
from megatron.config.data.objective import ObjectivePlan
from megatron.data.datasets.fim import FimDataset, fim_tokens
from megatron.data.datasets.run_datasets import View
from megatron.data.sampling.provenance import OneToOne, TracedSource
from megatron.data.sampling.sample_rng import sample_rng
from megatron.tokenizer.types.tokenizer import Tokenizer


class PrefixDataset(OneToOne):
    """Samples of another data set, each with prefixes whose lengths are drawn.

    The last token of a sample is only predicted, so s tokens are cut into prefix and target: after
    1 to s of them. With documents kept apart, each is cut separately; its end is never in the
    prefix, unless it is all there is. A part of a document at the end of a sample is cut like a
    full sample.

    Args:
        eod: the token that ends documents which are kept apart; None: one prefix a sample.

    Shapes: dataset[i] -> {"tokens": [s + 1], "prefix_ends": [s + 1]} int64: the latter for each of
        the s first tokens the position after the prefix of its document; its last entry is 0.
    Randomness: uniform, from the stream of the sample.
    """

    def __init__(self, dataset: TracedSource, *, eod: int | None, seed: int):
        super().__init__(dataset)
        self._eod = eod
        self._seed = seed

    def __getitem__(self, i: int) -> dict[str, NDArray]:
        tokens = self.dataset[i]["tokens"]
        s = len(tokens) - 1
        ends = np.array([], np.int64)
        if self._eod is not None:
            ends = np.flatnonzero(tokens[:s] == self._eod)
        starts = np.concatenate([[0], ends + 1])
        shortest = starts + 1
        longest = np.maximum(np.append(ends, s), shortest)
        if starts[-1] == s:  # the sample ends with its last document
            starts, shortest, longest = starts[:-1], shortest[:-1], longest[:-1]
        cuts = sample_rng(self._seed, i).randint(shortest, longest + 1)
        prefix_ends = np.zeros(s + 1, np.int64)
        prefix_ends[:s] = np.repeat(cuts, np.diff(np.append(starts, s)))
        return {"tokens": tokens, "prefix_ends": prefix_ends}


def fim_view(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> View | None:
    """Return a view that rearranges documents for fill-in-the-middle; None for a rate of 0."""
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


def prefix_view(
    objective: ObjectivePlan, masks: MaskPlan, tokenizer: Tokenizer, seed: int
) -> View | None:
    """Return a view that draws prefixes."""
    eod = tokenizer.eod if masks.isolate_documents else None
    return partial(PrefixDataset, eod=eod, seed=seed)
