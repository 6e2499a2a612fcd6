"""Tag schemes of named entities (BIO, BIOES, BILOU, BMES): the meaning of a tag's prefix."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from megatron.common.errors import ConfigError

OUTSIDE = "O"
"""Tag of words outside of all entities."""

TagScheme = Literal["BIO", "BIOES", "BILOU", "BMES", "types"]

PREFIXES: Mapping[str, Mapping[str, str]] = {
    "BIO": {"B": "B", "I": "I"},
    "BIOES": {"B": "B", "I": "I", "E": "E", "S": "S"},
    "BILOU": {"B": "B", "I": "I", "L": "E", "U": "S"},
    "BMES": {"B": "B", "M": "I", "E": "E", "S": "S", "W": "S"},
    "types": {},
}
"""Prefixes of each scheme, by the prefix of BIOES that means the same: the first, inner and last word
of an entity, and a single one. With "types" a tag is the type of an entity."""

_PREFIXED = re.compile(r"[A-Z]-.+")
_OTHER_FORMS = (re.compile(r"[BIESLUMW][_:/.].+"), re.compile(r".+[-_:/.][BIESLUMW]"))
_REMEDY = f"write --tag-scheme: one of {', '.join(PREFIXES)}; types: a label is a type by itself"


def tag_scheme_of(labels: Sequence[str]) -> str:
    """Return the scheme of the labels of words: the first that has all of their prefixes.

    Labels without prefixes are types by themselves, which BIOES includes.

    Raises:
        ConfigError: the labels belong to no scheme, or mix tags and types.
    """
    tags = [label for label in labels if label != OUTSIDE]
    prefixed = [tag for tag in tags if _PREFIXED.fullmatch(tag)]
    if not prefixed and "B" not in tags:
        for form in _OTHER_FORMS:
            if tags and all(map(form.fullmatch, tags)):
                raise ConfigError(f"labels such as {tags[0]} are no tags like B-PER: {_REMEDY}")
        if lower := [tag for tag in tags if tag.startswith(("b-", "i-"))]:
            raise ConfigError(f"labels such as {lower[0]} begin with a small letter: {_REMEDY}")
        return "BIOES"
    alone = [tag for tag in tags if tag not in prefixed]
    letters = {tag[0] for tag in prefixed} | {tag for tag in alone if len(tag) == 1}
    for scheme in ("BIOES", "BILOU", "BMES"):
        if letters <= {*PREFIXES[scheme]} and all(len(tag) == 1 for tag in alone):
            return scheme
    if words := [tag for tag in alone if len(tag) > 1 or not tag.isalpha()]:
        raise ConfigError(
            f"the label {words[0]} has no prefix, and others such as {(prefixed or alone)[0]} have: "
            f"{_REMEDY}"
        )
    raise ConfigError(f"the prefixes {', '.join(sorted(letters))} of labels: {_REMEDY}")
