"""Unknown flags: the answer to a name that other trainers use, or the known flag that is meant."""

from collections.abc import Iterable, Mapping
from functools import cache

_LONG = 6  # in words of so many letters, two of them may be wrong
_SHORT = (
    4  # in words of fewer letters, none is replaced: pp and tp are no misspellings of each other
)

_LENGTH = "write --out-seq-length"
_SAMPLES = (
    "a prompt has one continuation: repeat it in the lines of --sample-input-file; without a prompt, "
    "write --num-samples"
)

_GENERATION: Mapping[str, str] = {
    **dict.fromkeys(("max-new-tokens", "max-tokens", "max-length", "max-gen-toks"), _LENGTH),
    **dict.fromkeys(("num-return-sequences", "n", "best-of"), _SAMPLES),
    "do-sample": "sampling is the default; --greedy turns it off",
    "num-beams": "write --beam-width",
    "stop": "write --stop-strings",
    "stop-token-ids": "write --stop-tokens",
    "eos-token-id": "write --stop-tokens",
    "model": "write --load",
    "model-path": "write --load",
    "max-model-len": "write --inference-max-seq-length",
    "prompts": "write --sample-input-file, a prompt a line",
    "use-cache": "the KV cache is on unless --recompute is given",
    "batch-size": "write --micro-batch-size",
}

_PREPROCESSING: Mapping[str, str] = {
    "tokenizer": "write --tokenizer-type, and the files or the folder that this type needs",
    "tokenizer-path": "write --tokenizer-type PretrainedFromHF and --tokenizer-name-or-path",
    **dict.fromkeys(("key", "keys", "column", "text-column", "field"), "write --json-keys"),
    **dict.fromkeys(("output", "out", "output-dir", "save"), "write --output-prefix"),
    **dict.fromkeys(("num-workers", "num-proc"), "write --workers"),
}

_VOCABULARY: Mapping[str, str] = {
    **dict.fromkeys(("out", "output-dir", "save", "output-prefix"), "write --output"),
    **dict.fromkeys(("key", "json-keys", "column"), "write --json-key"),
    **dict.fromkeys(("files", "data", "corpus"), "write --input"),
}

_GPUS = "write --num-gpus N: the GPUs of all nodes"

_PLANNING: Mapping[str, str] = dict.fromkeys(
    ("gpus", "n-gpus", "devices", "num-devices", "num-nodes", "nnodes", "nproc-per-node"), _GPUS
)

OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "GenerationConfig": _GENERATION,
    "PlanningConfig": _PLANNING,
    "PreprocessConfig": _PREPROCESSING,
    "TokenizerTrainingConfig": _VOCABULARY,
}
"""By class of a section, and by name with hyphens, what to write in place of it, in addition to
the names of trainers in megatron/config/foreign_flags/trainers.py."""


@cache
def plain(option: str) -> str:
    """Return `option` with hyphens for underscores: both spell the same flag."""
    return option.replace("_", "-")


def field_of(option: str) -> str:
    """Return the name of an option as fields have it, such as num_layers for --num-layers."""
    return option.removeprefix("--").replace("-", "_")


def answer_for(name: str, answers: Mapping[str, str], known: Iterable[str]) -> str:
    """Return advice about the unknown flag `name`; "" if there is none.

    Args:
        name: without its dashes.
        answers: sentences by name, of flags that are not accepted; by "NAME VALUE" of values.
        known: the accepted flags, without their dashes.
    """
    name, accepted = plain(name).lower(), [plain(each) for each in known]
    last = name.rpartition(".")[2]  # of a name with sections, such as optimizer.lr
    if found := answers.get(name) or answers.get(last):
        return found
    if last in accepted:
        return f"write --{last}"
    if f"no-{name}" in accepted:
        return f"it is on unless --no-{name} is given"
    near = _nearest(last, [*accepted, *(each for each in answers if " " not in each)])
    return answers.get(near) or (f"did you mean --{near}?" if near else "")


def _nearest(name: str, known: Iterable[str]) -> str:
    """Return the one of `known` of which `name` is a misspelling or the only abbreviation; "" if none is.

    Words that differ in meaning make another flag: none is left out, added or negated, but for "num".
    """
    known = dict.fromkeys(known)
    same = [each for each in known if sorted(each.split("-")) == sorted(name.split("-"))]
    same += [each for each in known if each.replace("-", "") == name.replace("-", "")]
    same += [each for each in known if _without_num(each) == _without_num(name)]
    typos = [each for each in known if _is_misspelled(name.split("-"), each.split("-"))]
    longer = [each for each in known if len(name) >= _SHORT and each.startswith(name)]
    found = same or typos or (longer if len(longer) == 1 else [])
    return min(found, key=lambda each: distance(name, each)) if found else ""


def _without_num(name: str) -> list[str]:
    return [word for word in name.split("-") if word != "num"]


def _is_misspelled(words: list[str], known: list[str]) -> bool:
    if len(words) != len(known):
        return False
    wrong = [(one, other) for one, other in zip(words, known, strict=True) if one != other]
    return sum(distance(*pair) for pair in wrong) <= 2 and all(
        (max(map(len, pair)) >= _SHORT or len(pair[0]) != len(pair[1]))
        and distance(*pair) <= (2 if min(map(len, pair)) >= _LONG else 1)
        and [*filter(str.isdigit, pair[0])] == [*filter(str.isdigit, pair[1])]
        for pair in wrong
    )


def distance(one: str, other: str) -> int:
    """Return the edit distance of two words: letters inserted, removed, replaced or swapped."""
    above: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, above, row = above, row, [i]
        for j, theirs in enumerate(other, 1):
            replaced = above[j - 1] + (letter != theirs)
            row.append(min(above[j] + 1, row[j - 1] + 1, replaced))
            if i > 1 and j > 1 and letter == other[j - 2] and theirs == one[i - 2]:
                row[j] = min(row[j], before[j - 2] + 1)
    return row[-1]
