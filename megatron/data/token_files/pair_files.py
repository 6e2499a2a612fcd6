"""Pairs of token files (PREFIX.bin and PREFIX.idx): whether they exist, and similar names if not."""

import difflib
import os
from pathlib import Path

from megatron.common.errors import DataError, WrongDataError

_SHOWN = 4  # pairs that a message suggests
_SUFFIXES = (".bin", ".idx", ".jsonl", ".json", ".txt", ".parquet")
_ENDINGS = ("_document", "_sentence")


def pair_of(prefix: str) -> tuple[Path, Path]:
    """Return the paths PREFIX.bin and PREFIX.idx."""
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def existing_pair(prefix: str) -> tuple[Path, Path]:
    """Return the paths PREFIX.bin and PREFIX.idx.

    Raises:
        WrongDataError: one is missing; the message names the pairs with the nearest names.
    """
    pair = pair_of(prefix)
    missing = [str(path) for path in pair if not path.is_file()]
    if not missing:
        return pair
    hint = "give the path of a .bin/.idx pair without its suffix"
    if prefix.endswith("_tokens_document"):
        hint = (
            "tools/preprocess_data.py --conversations makes them, for --data-path "
            f"{prefix.removesuffix('_tokens_document')}"
        )
    folder = os.path.dirname(prefix) or "."
    if not os.path.isdir(folder):
        hint = f"there is no folder {folder}"
    elif found := _similar_pairs(prefix):
        hint += f"; did you mean {' or '.join(found)}?"
    raise WrongDataError(f"no token files at {prefix}: {' and '.join(missing)} missing; {hint}")


def _similar_pairs(prefix: str) -> list[str]:
    """Return the pairs that `prefix` may stand for, the nearest first.

    These are the pair itself, given with a suffix; pairs that preprocessing names after it
    (PREFIX_KEY_document); pairs in a folder; and pairs whose name differs by a few letters.
    """
    prefix = prefix.rstrip("/")
    folder, name = (prefix, "") if os.path.isdir(prefix) else os.path.split(prefix)
    pairs = sorted(
        path.stem for path in Path(folder).glob("*.idx") if path.with_suffix(".bin").is_file()
    )
    stem = next((name.removesuffix(each) for each in _SUFFIXES if name.endswith(each)), name)
    if stem in pairs:
        return [os.path.join(folder, stem)]
    base = next((stem.removesuffix(each) for each in _ENDINGS if stem.endswith(each)), stem)
    named_after = [pair for pair in pairs if not name or pair.startswith(f"{base}_")]
    lower = {pair.lower(): pair for pair in pairs}
    near = difflib.get_close_matches(stem.lower(), lower, n=_SHOWN, cutoff=0.8)
    found = named_after or [lower[each] for each in near]
    return [os.path.join(folder, each) for each in found[:_SHOWN]]


def require_length(path: Path, expected_bytes: int) -> None:
    """Raise a DataError if the file `path` is not of this length."""
    found_bytes = path.stat().st_size
    if found_bytes != expected_bytes:
        state = "truncated" if found_bytes < expected_bytes else "not of this index"
        raise DataError(
            f"{path} is {state}: expected {expected_bytes} bytes, found {found_bytes}; "
            "copy or make the .bin/.idx pair again"
        )
