"""Finished stages become token files, a report and a list of bad lines: all of them, or none."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.common.atomic_files import flush
from megatron.common.errors import DataError
from megatron.data.preprocessing.block_encoder import EncodingRules
from megatron.data.preprocessing.preprocess_spec import Conversion, fingerprint
from megatron.data.preprocessing.quality import Tally
from megatron.data.preprocessing.report import key_report, readable
from megatron.data.preprocessing.shard_writer import (
    Position,
    key_file,
    part_directory,
    position_of,
    read_state,
    remove_stage,
    write_json,
)
from megatron.data.readers.inputs import split_sources
from megatron.data.token_files.block_digests import write_digests
from megatron.data.token_files.copying import copy_extents, lay_end_to_end
from megatron.data.token_files.differences import differences
from megatron.data.token_files.index_files import (
    INDEX_WRITERS,
    IndexContent,
    counting,
    pieces_of_file,
)
from megatron.data.token_files.outputs import report_of
from megatron.data.token_files.publish import publish_pair, write_errors_name

_PUBLISH = "publish.json"


@dataclass(frozen=True)
class Written:
    """One published .bin/.idx pair."""

    prefix: str
    key: str
    documents: int
    dropped: int  # documents that are left out, because they have no token under some key
    empty: int  # documents without a token under this key
    bad: int  # lines that were skipped
    tokens: int
    bytes: int  # of both files
    report: tuple[str, ...]  # lines for people


def was_assembled(root: Path) -> bool:
    """Whether nothing is left to do but to give the files their names."""
    return (root / _PUBLISH).exists()


def forget_assembled(root: Path) -> None:
    """Begin again: what is assembled is not what is wanted. To be called before parts change."""
    with write_errors_name(root):
        (root / _PUBLISH).unlink(missing_ok=True)


def require_assembled_of(conversion: Conversion, rules: EncodingRules, num_parts: int) -> None:
    """Check that what is assembled was made from these inputs and with these wishes.

    Raises:
        DataError: everything that is otherwise now.
    """
    root = conversion.root
    wishes = json.loads((root / _PUBLISH).read_text()).get("wishes")
    begin_again = f"remove {root}, and convert again"
    if wishes is None:
        raise DataError(f"{root} is of an earlier version, and does not say of what; {begin_again}")
    if found := differences(wishes, _wishes(conversion, rules, num_parts)):
        raise DataError(
            f"{root} holds the finished work of another run: {'; '.join(found)}; run as before, "
            f"or {begin_again}"
        )


def assemble(conversion: Conversion, rules: EncodingRules, num_parts: int) -> list[Written]:
    """Write the token files from the stages of all parts, and publish them.

    Raises:
        DataError: a part is not finished, no document is left, or the disk is full.
    """
    root = conversion.root
    parts = [part_directory(root, part, num_parts) for part in range(num_parts)]
    positions = [position_of(_finished(part)) for part in parts]
    written = [sum(of_part) for of_part in zip(*(p.written for p in positions), strict=True)]
    empty = [sum(of_part) for of_part in zip(*(p.empty for p in positions), strict=True)]
    if without := [
        k for k in range(len(written)) if written[k] <= empty[k] * rules.has_empty_entries
    ]:
        keys = " and ".join(repr(rules.keys[k]) for k in without)
        reason = _why_nothing_is_left(
            conversion, root, parts, positions, max(empty[k] for k in without)
        )
        remove_stage(parts)
        raise DataError(f"nothing to write for key {keys}: {reason}")
    pairs, report = [], {}
    for k, key in enumerate(rules.keys):
        prefix = conversion.prefix_of(key)
        content = _content(parts, k, rules, written[k])
        with write_errors_name(Path(prefix + ".bin")):
            bin_path = _joined(parts, k, root, conversion.workers * conversion.partitions)
            write_digests(bin_path, _staged_digests(root, k))
        with write_errors_name(Path(prefix + ".idx")), (root / f"{k}.idx").open("wb") as file:
            INDEX_WRITERS[conversion.dataset_impl](file, content)
        pairs.append([str(bin_path), str(root / f"{k}.idx"), prefix])
        report[key] = key_report(
            parts,
            k,
            _total_tally(positions, k),
            itemsize=rules.dtype.itemsize,
            suffix_tokens=len(rules.suffix),
        ) | {
            "without_tokens": empty[k],
            "dropped_documents": _num_dropped(rules, positions, empty[k]),
        }
    totals = {
        "inputs": list(conversion.inputs),
        "input_bytes": sum(position.input_bytes for position in positions),
        "documents": sum(position.documents for position in positions),
        "dropped_documents": sum(position.dropped for position in positions),
        "bad_lines": sum(position.bad for position in positions),
    }
    said = {**totals, "tokenizer": dict(conversion.tokenizer), "keys": report}
    moves = [_staged_report(conversion, root, said), *_staged_bad_lines(conversion, root, parts)]
    with write_errors_name(root):
        for pair in pairs:
            flush(Path(pair[0]))
            flush(Path(pair[1]))
        write_json(
            root / _PUBLISH,
            {
                "wishes": _wishes(conversion, rules, num_parts),
                "pairs": pairs,
                "moves": moves,
                "report": said,
            },
        )
    return publish_staged(root)


def require_parts_of_one_conversion(
    conversion: Conversion, rules: EncodingRules, num_parts: int
) -> None:
    """Check that every part was made from these inputs, as they are, and with these wishes.

    Raises:
        DataError: everything that another process wanted or found otherwise.
    """
    sources = conversion.sources()
    problems = []
    for k in range(num_parts):
        part = part_directory(conversion.root, k, num_parts)
        mine = fingerprint(conversion, rules, split_sources(sources, k, num_parts))
        problems += [
            f"{part}: {each}" for each in differences(_finished(part)["fingerprint"], mine)
        ]
    if problems:
        raise DataError(
            "the shards are not parts of this conversion; merge with the flags that made them, or "
            "convert these again without --resume:\n" + "\n".join(problems)
        )


def publish_staged(root: Path) -> list[Written]:
    """Give the staged files their names. A run that is killed in here is finished by the next."""
    staged = json.loads((root / _PUBLISH).read_text())
    for k, (bin_path, idx_path, prefix) in enumerate(staged["pairs"]):
        publish_pair(Path(bin_path), Path(idx_path), _staged_digests(root, k), prefix)
    for source, target in staged["moves"]:
        with write_errors_name(Path(target)):
            if Path(source).exists():
                os.replace(source, target)
    said = staged["report"]
    return [
        Written(
            prefix=prefix,
            key=key,
            documents=of_key["documents"],
            dropped=of_key["dropped_documents"],
            empty=of_key["without_tokens"],
            bad=said["bad_lines"],
            tokens=of_key["tokens"],
            bytes=sum(os.path.getsize(prefix + suffix) for suffix in (".bin", ".idx")),
            report=tuple(readable(key, of_key)),
        )
        for (_, _, prefix), (key, of_key) in zip(staged["pairs"], said["keys"].items(), strict=True)
    ]


def _why_nothing_is_left(
    conversion: Conversion,
    root: Path,
    parts: Sequence[Path],
    positions: Sequence[Position],
    empty: int,
) -> str:
    """Return what became of the documents; bad lines that are collected are published.

    Args:
        empty: documents without a token.
    """
    inputs = ", ".join(conversion.inputs)
    dropped = max(empty, sum(position.dropped for position in positions))
    bad = sum(position.bad for position in positions)
    if not any(position.input_bytes for position in positions):
        return f"the input {inputs} is empty"
    if not dropped and not bad:
        return f"the input {inputs} holds nothing but blank lines"
    if not bad:
        return f"none of the {dropped} documents in {inputs} has a token"
    with (next(part for part in parts if (part / "bad").stat().st_size) / "bad").open() as file:
        first = json.loads(file.readline())
    word = "row" if "row" in first else "line"
    place = f"{first['file']}, {word} {first[word]}: {first['problem']}"
    listed = ""
    for staged, target in _staged_bad_lines(conversion, root, parts):
        with write_errors_name(Path(target)):
            os.replace(staged, target)
        listed = f" ({target} lists them)"
    if dropped:
        others = f"{dropped} documents in {inputs} have no token, and the other {bad} {word}s"
    else:
        others = f"all {bad} {word}s of {inputs}"
    return f"{others} were left out as bad{listed}, the first: {place}"


def _num_dropped(rules: EncodingRules, positions: Sequence[Position], empty: int) -> int:
    """Return how many documents are left out under a key that has `empty` without a token."""
    if rules.empty_documents == "per-key":
        return empty
    return sum(position.dropped for position in positions)


def _wishes(conversion: Conversion, rules: EncodingRules, num_parts: int) -> dict[str, Any]:
    """Return everything that the published files depend on."""
    return {
        "the number of parts": num_parts,
        **fingerprint(conversion, rules, conversion.sources()),
        "--dataset-impl": conversion.dataset_impl,
        "--on-error collect": conversion.bad_lines_path,
    }


def _finished(part: Path) -> dict[str, Any]:
    state = read_state(part)
    if state is None or not position_of(state).is_done:
        raise DataError(f"{part} is not finished; run its shard again with --resume, then merge")
    return state


def _content(parts: Sequence[Path], key: int, rules: EncodingRules, documents: int) -> IndexContent:
    sequences = sum(key_file(part, key, "sizes").stat().st_size // 4 for part in parts)

    def sizes() -> Iterator[NDArray]:
        for part in parts:
            yield from pieces_of_file(key_file(part, key, "sizes"), np.dtype("<i4"))

    def document_starts() -> Iterator[NDArray]:
        if not rules.counts_sequences:
            yield from counting(documents + 1)
            return
        end = np.zeros(1, "<i8")
        yield end
        for part in parts:
            for counts in pieces_of_file(key_file(part, key, "counts"), np.dtype("<i4")):
                ends = end[-1] + np.cumsum(counts, dtype="<i8")
                yield ends
                end = ends

    return IndexContent(
        dtype=rules.dtype,
        num_sequences=sequences,
        num_documents=documents,
        sizes=sizes,
        document_starts=document_starts,
    )


def _joined(parts: Sequence[Path], key: int, root: Path, workers: int) -> Path:
    """Return a file with the tokens of all parts."""
    if len(parts) == 1:
        return key_file(parts[0], key, "bin")
    path = root / f"{key}.bin"
    path.unlink(missing_ok=True)
    sources = [key_file(part, key, "bin") for part in parts]
    copy_extents(lay_end_to_end(sources), path, workers=min(workers, 4))
    return path


def _staged_digests(root: Path, key: int) -> Path:
    return root / f"{key}.bin.xxh3"


def _total_tally(positions: Sequence[Position], key: int) -> Tally:
    total, before = Tally(), 0
    for position in positions:
        total.add(position.tallies[key], before)
        before += position.written[key]
    return total


def _staged_report(conversion: Conversion, root: Path, said: dict[str, Any]) -> list[str]:
    target = report_of(conversion.output_prefix)
    with write_errors_name(Path(target)):
        write_json(root / "report.json", said)
    return [str(root / "report.json"), target]


def _staged_bad_lines(
    conversion: Conversion, root: Path, parts: Sequence[Path]
) -> Iterator[list[str]]:
    if conversion.bad_lines_path is None:
        return
    with write_errors_name(Path(conversion.bad_lines_path)):
        staged = Path(conversion.bad_lines_path + ".new")
        staged.unlink(missing_ok=True)
        copy_extents(lay_end_to_end([part / "bad" for part in parts]), staged)
    yield [str(staged), conversion.bad_lines_path]
