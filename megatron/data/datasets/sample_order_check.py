"""Check at resume that the sample order equals the saved run's."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megatron.common.registry import KINDS
from megatron.config.data.corpora import DataPlan, suffixes_of
from megatron.data.datasets.run_datasets import CorpusUse
from megatron.data.sampling.blending import samples_wanted
from megatron.data.sampling.sample_index import Epochs, plan_epochs

_OF_ORDER = {
    "is_random": "--mock-data",
    "split": "--split",
    "order": "--dataloader-type",
    "kind": "the objective",
}


def other_order(
    then: DataPlan, now: DataPlan, uses: Sequence[CorpusUse], *, seq_length: int
) -> Iterator[str]:
    """Yield every reason why the sample order of `now` differs from `then`.

    The length of the run is one: Megatron shuffles all epochs that it wants together. Other paths
    are none, because files may have moved; texts are packed in an order that the length does not
    change.

    Args:
        then: of the saved run, with the plan of an extension as a manifest holds it.
        uses: use of each corpus by the training set of `now`.
        seq_length: of both runs.
    """
    for name, flag in _OF_ORDER.items():
        saved, current = getattr(then, name), getattr(now, name)
        if saved != current:
            yield f"{flag} was {saved or 'not given'} and is {current or 'not given'}"
    if now.cut and then.cut not in (None, asdict(now.cut)):
        yield f"documents are cut into samples by another {now.cut.flags}"
    if now.is_random:  # random samples depend on their index alone
        return
    counts = then.train.num_samples, now.train.num_samples
    surpluses = then.blend_surplus, now.blend_surplus
    reason = f"the run has {counts[1]} training samples in all, and had {counts[0]}"
    if counts[0] == counts[1]:
        reason = f"--mid-level-dataset-surplus was {surpluses[0]} and is {surpluses[1]}"
    elif now.order == "cyclic" and _permutes_others(now, uses, *counts):
        yield f"{reason}, which --dataloader-type cyclic permutes"
    if not (suffixes_of(now.kind) and KINDS.get(now.kind).repeats_documents):
        return
    weights = [use.weight for use in uses]
    wanted = [
        samples_wanted(weights, n, now.sample_order, surplus) if now.train.is_blend else [n]
        for n, surplus in zip(counts, surpluses, strict=True)
    ]
    for use, *numbers in zip(uses, *wanted, strict=True):
        if now.cut:
            sizes = [use.size_for(n) for n in numbers]
            if sizes[0] != sizes[1]:
                yield f"{reason}: {use.prefix} is shuffled over another number of epochs"
            continue
        before, after = (
            plan_epochs(
                use.tokens, num_samples=n, seq_length=seq_length, sample_order=now.sample_order
            )
            for n in numbers
        )
        if before != after:
            yield f"{reason}: {use.prefix} is shuffled over {_text(after)}, and was over {_text(before)}"


def _permutes_others(now: DataPlan, uses: Sequence[CorpusUse], before: int, after: int) -> bool:
    """Whether the number of permuted samples has changed.

    A blend permutes as many samples as are wanted, a single corpus the samples of all epochs that
    are needed for them.
    """
    if now.train.is_blend or now.kind == "documents":
        return now.train.is_blend
    (use,) = uses
    return use.size_for(before) != use.size_for(after)


def _text(epochs: Epochs) -> str:
    number = epochs.num_epochs
    apart = " (the last shuffled apart)" if epochs.has_separate_last else ""
    return f"{number} epoch{'s' if number > 1 else ''}{apart}"
