"""Entity-level F1 of token classification: BIO spans by the rules of conlleval."""

from collections import Counter
from collections.abc import Iterator, Sequence

from megatron.data.downstream.metrics import Score, scores_with_averages

_PREFIXES = frozenset("BIESO")


def entities(tags: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield type, start and end of each entity of a sentence; the end is exclusive.

    An entity begins at B- or S-, after E- or S-, where the type changes, and at an I- or E- after
    O. A tag that is neither O nor has such a prefix is a type by itself, as I- of that type; B and
    I alone have the type "".
    """
    start, previous, current = 0, "O", ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, kind = _parsed(tag)
        is_continued = prefix in "IE" and previous in "BI" and kind == current
        if not is_continued:
            if previous != "O":
                yield current, start, i
            start, current = i, kind
        previous = prefix


def entity_scores(
    predictions: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]
) -> dict[str, Score]:
    """Return the score of each type of entity, and their averages.

    An entity is correct if its type and both of its borders are. "micro avg" is the overall score of
    conlleval.

    Args:
        predictions: tags of each sentence, as many as its `labels`.
    """
    correct: Counter[str] = Counter()
    predicted: Counter[str] = Counter()
    true: Counter[str] = Counter()
    for predicted_tags, true_tags in zip(predictions, labels, strict=True):
        if len(predicted_tags) != len(true_tags):
            raise ValueError(f"{len(predicted_tags)} predictions for {len(true_tags)} labels")
        found, expected = {*entities(predicted_tags)}, {*entities(true_tags)}
        predicted.update(kind for kind, *_ in found)
        true.update(kind for kind, *_ in expected)
        correct.update(kind for kind, *_ in found & expected)
    kinds = sorted(predicted | true)
    return scores_with_averages({k: (correct[k], predicted[k], true[k]) for k in kinds})


def _parsed(tag: str) -> tuple[str, str]:
    """Return prefix and type of a tag."""
    prefix, hyphen, kind = tag.partition("-")
    if prefix in _PREFIXES and (hyphen or not kind):
        return prefix, kind
    return "I", tag
