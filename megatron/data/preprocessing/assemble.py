"""Assembly of preprocessing: joins finished shards into token files and publishes them atomically."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.common.atomic_files import flush
from megatron.common.errors import DataError
from megatron.data.preprocessing.block_encoder import EncodingRules
from megatron.data.preprocessing.join_shards import JOINED, staged_digests, write_pair
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec, differences
from megatron.data.preprocessing.report import key_report, readable, retry_first_documents
from megatron.data.preprocessing.shard_writer import (
    ShardState,
    finished_shards,
    intact_shards,
    new_state,
    read_options,
    remove_folders,
    write_json,
)
from megatron.data.preprocessing.shards import Shard
from megatron.data.token_files.copying import copy_extents, lay_end_to_end
from megatron.data.token_files.publish import (
    publish_pair,
    report_of,
    staged_record,
    write_errors_name,
)

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
    unselected: int  # documents that --where leaves out
    tokens: int
    bytes: int  # of both files
    report: tuple[str, ...]  # lines for people


def was_assembled(staging: Path) -> bool:
    """Whether nothing is left to do but to publish the files."""
    return (staging / _PUBLISH).exists()


def _read_assembled(staging: Path) -> dict[str, Any]:
    """Return the list of assembled files.

    Raises:
        DataError: it is damaged.
    """
    path = staging / _PUBLISH
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.keys() >= {"pairs", "moves", "report"}:
            return content
        problem = "entries are missing"
    except (ValueError, AttributeError) as error:
        problem = str(error)
    raise DataError(
        f"{path} is damaged ({problem}); remove it, and run the same command with --resume to join "
        "the shards again"
    )


def forget_assembled(staging: Path) -> None:
    """Begin again: do not publish the assembled files. Called before shards change."""
    with write_errors_name(staging):
        for path in (staging / _PUBLISH, *staging.glob(f"*{JOINED}")):
            path.unlink(missing_ok=True)


def require_assembled_of(spec: PreprocessSpec, options: Mapping[str, Any]) -> None:
    """Check that the assembled files were made from these inputs and with these options.

    Raises:
        DataError: listing all that is different.
    """
    staging = spec.staging
    content = _read_assembled(staging)
    assembled = content.get("options")
    begin_again = f"remove {staging}, and convert again"
    if assembled is None:
        raise DataError(f"{staging} holds work of an earlier version; {begin_again}")
    if found := differences(assembled, _published_options(spec, options)):
        raise DataError(
            f"{staging} holds the finished work of another run: {'; '.join(found)}; run as before, "
            f"or {begin_again}"
        )
    require_no_bad_lines(spec, content["report"]["bad_lines"])


def require_same_options(
    staging: Path, finished: Iterable[ShardState], options: Mapping[str, Any]
) -> None:
    """Check that finished shards were made from these inputs and with these options.

    Raises:
        DataError: listing all that is different.
    """
    found: dict[str, None] = {}
    for digest in sorted({state.options for state in finished}):
        found |= dict.fromkeys(differences(read_options(staging, digest), options))
    if found:
        raise DataError(
            f"the finished shards in {staging} are of another conversion: {'; '.join(found)}; run "
            f"as before, or remove {staging} to convert all again"
        )


def require_no_bad_lines(spec: PreprocessSpec, bad: int) -> None:
    """Check that finished work left no bad line out where `--on-error stop` refuses one.

    Args:
        bad: lines that it left out.

    Raises:
        DataError: there are such lines.
    """
    if bad and spec.on_error == "stop":
        raise DataError(
            f"--on-error stop: {spec.staging} holds finished work that left out {bad} bad lines; "
            "give --on-error skip or collect FILE as before, or convert all again without --resume"
        )


def assemble(
    spec: PreprocessSpec,
    rules: EncodingRules,
    shards: Sequence[Shard],
    options: Mapping[str, Any],
    *,
    verify: bool,
) -> list[Written]:
    """Join the finished shards into token files, each with the record of its tokenizer; publish.

    Args:
        verify: whether other processes wrote the shards, which are then compared with their digests.

    Raises:
        DataError: a shard is not finished or of other options, no document is left, or the disk
            is full.
    """
    staging = spec.staging
    states = _finished_shards(spec, shards, options, verify=verify)
    total = _total(states.values(), len(rules.keys))
    folders = [staging / name for name in states]
    _require_documents(spec, rules, folders, total)
    retry_first_documents(spec, rules, total.tallies)
    with staged_record(spec.prefixes, spec.record, is_kept=lambda: was_assembled(staging)):
        pairs, key_reports = [], {}
        for k, key in enumerate(rules.keys):
            pairs.append(write_pair(spec, rules, states, k, total.written[k]))
            key_reports[key] = key_report(
                folders,
                k,
                total.tallies[k],
                itemsize=rules.dtype.itemsize,
                suffix_tokens=len(rules.suffix),
            ) | {
                "without_tokens": total.empty[k],
                "dropped_documents": total.empty[k]
                if rules.empty_documents == "per-key"
                else total.dropped,
            }
        report = {
            "inputs": list(spec.inputs),
            "input_bytes": total.input_bytes,
            "documents": total.documents,
            "dropped_documents": total.dropped,
            "bad_lines": total.bad,
            "unselected_documents": total.unselected,
            "tokenizer": dict(spec.tokenizer),
            "keys": key_reports,
        }
        moves = [_staged_report(spec, report), *_staged_bad_lines(spec, folders)]
        with write_errors_name(staging):
            for bin_path, idx_path, _ in pairs:
                flush(Path(bin_path))
                flush(Path(idx_path))
            assembled = {"pairs": pairs, "moves": moves, "report": report}
            assembled["options"] = _published_options(spec, options)
            write_json(staging / _PUBLISH, assembled)
        return publish_assembled(staging)


def publish_assembled(staging: Path) -> list[Written]:
    """Rename the assembled files to their names. If killed, the next run continues here."""
    assembled = _read_assembled(staging)
    for k, (bin_path, idx_path, prefix) in enumerate(assembled["pairs"]):
        publish_pair(Path(bin_path), Path(idx_path), staged_digests(staging, k), prefix)
    for source, target in assembled["moves"]:
        with write_errors_name(Path(target)):
            if Path(source).exists():
                os.replace(source, target)
    report = assembled["report"]
    return [
        Written(
            prefix=prefix,
            key=key,
            documents=key_report["documents"],
            dropped=key_report["dropped_documents"],
            empty=key_report["without_tokens"],
            bad=report["bad_lines"],
            unselected=report.get("unselected_documents", 0),
            tokens=key_report["tokens"],
            bytes=sum(os.path.getsize(prefix + suffix) for suffix in (".bin", ".idx")),
            report=tuple(readable(key, key_report)),
        )
        for (_, _, prefix), (key, key_report) in zip(
            assembled["pairs"], report["keys"].items(), strict=True
        )
    ]


def _published_options(spec: PreprocessSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the published files depend on."""
    return {
        **options,
        "--dataset-impl": spec.dataset_impl,
        "--on-error collect": spec.bad_lines_path,
    }


def _finished_shards(
    spec: PreprocessSpec, shards: Sequence[Shard], options: Mapping[str, Any], *, verify: bool
) -> dict[str, ShardState]:
    """Return the state of all shards in order, including shards of packed files.

    Raises:
        DataError: shards are not finished, or were made with other options or inputs.
    """
    finished = finished_shards(spec.staging)
    if verify:
        finished = intact_shards(spec.staging, finished)
    names: list[str] = []
    missing = []
    for shard in shards:
        pieces, are_all = shard.finished_pieces(finished)
        names += pieces
        if not are_all:
            missing.append(shard.name)
    if missing:
        first = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DataError(
            f"{len(missing)} of {len(shards)} shards in {spec.staging} are not finished ({first}); "
            "run the processes that convert them again with --resume, then merge"
        )
    found = {name: finished[name] for name in names}
    require_same_options(spec.staging, found.values(), options)
    require_no_bad_lines(spec, sum(state.bad for state in found.values()))
    return found


def _require_documents(
    spec: PreprocessSpec, rules: EncodingRules, folders: Sequence[Path], total: ShardState
) -> None:
    """Check that each key has a document with tokens; remove the shards if one has none.

    Raises:
        DataError: a key has none, and why.
    """
    without = [
        k
        for k in range(len(rules.keys))
        if total.written[k] <= total.empty[k] * rules.has_empty_entries
    ]
    if without:
        keys = " and ".join(repr(rules.keys[k]) for k in without)
        reason = _why_nothing_is_left(spec, folders, total, max(total.empty[k] for k in without))
        remove_folders(folders)
        raise DataError(f"nothing to write for key {keys}: {reason}")


def _total(states: Iterable[ShardState], num_keys: int) -> ShardState:
    """Return the sum of the counts of all shards."""
    total = new_state(num_keys)
    for state in states:
        for k in range(num_keys):
            total.tallies[k].add(state.tallies[k], total.written[k])
            total.written[k] += state.written[k]
            total.empty[k] += state.empty[k]
        total.documents += state.documents
        total.dropped += state.dropped
        total.bad += state.bad
        total.unselected += state.unselected
        total.input_bytes += state.input_bytes
    return total


def _staged_report(spec: PreprocessSpec, report: Mapping[str, Any]) -> list[str]:
    target = report_of(spec.output_prefix)
    with write_errors_name(Path(target)):
        write_json(spec.staging / "report.json", report)
    return [str(spec.staging / "report.json"), target]


def _staged_bad_lines(spec: PreprocessSpec, folders: Sequence[Path]) -> Iterator[list[str]]:
    if spec.bad_lines_path is None:
        return
    with write_errors_name(Path(spec.bad_lines_path)):
        staged = Path(spec.bad_lines_path + ".new")
        staged.unlink(missing_ok=True)
        copy_extents(lay_end_to_end(_bad_lines_of(folders)), staged)
        flush(staged)
    yield [str(staged), spec.bad_lines_path]


def _bad_lines_of(folders: Sequence[Path]) -> list[Path]:
    return [path for folder in folders if (path := folder / "bad").exists()]


def _why_nothing_is_left(
    spec: PreprocessSpec, folders: Sequence[Path], total: ShardState, empty: int
) -> str:
    """Return why no document is left; bad lines that are collected are published.

    Args:
        empty: documents without a token.
    """
    inputs = ", ".join(spec.inputs)
    dropped = max(empty, total.dropped)
    if not total.input_bytes:
        return f"the input {inputs} is empty"
    if spec.where and total.unselected and not dropped and not total.bad:
        return (
            f"none of the {total.unselected} documents in {inputs} has the {spec.where.key} "
            f"{' or '.join(map(repr, spec.where.values))} of --where"
        )
    if not dropped and not total.bad:
        return f"the input {inputs} holds nothing but blank lines"
    if not total.bad:
        return f"none of the {dropped} documents in {inputs} has a token"
    with _bad_lines_of(folders)[0].open() as file:
        first = json.loads(file.readline())
    word = "row" if "row" in first else "line"
    where = f"{first['file']}, {word} {first[word]}: {first['problem']}"
    listed = ""
    for staged, target in _staged_bad_lines(spec, folders):
        with write_errors_name(Path(target)):
            os.replace(staged, target)
        listed = f" ({target} lists them)"
    others = f"all {total.bad} {word}s of {inputs}"
    if dropped:
        others = f"{dropped} documents in {inputs} have no token, and the other {total.bad} {word}s"
    return f"{others} were left out as bad{listed}, the first: {where}"
