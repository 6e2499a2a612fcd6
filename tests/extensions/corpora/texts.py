"""Texts to clean."""

import random

_WORDS = (
    "the of and to in is was for on that by with as at from this be are an it river city house "
    "music paper winter summer train people water light company history report market garden"
)


def english(seed, sentences=30):
    """Return sentences of common English words; others for another seed."""
    choose, words = random.Random(seed), _WORDS.split()
    return " ".join(
        " ".join(choose.choice(words) for _ in range(12)).capitalize() + "."
        for _ in range(sentences)
    )


FRENCH = "Le maire a déclaré mardi que le nouveau pont serait ouvert au printemps. " * 20
