"""Find the fastest number of preprocessing workers by a trial on the first documents."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.common.errors import ConfigError, DataError
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import (
    PreprocessSpec,
    first_documents,
    require_columns,
)
from megatron.data.token_files.publish import write_errors_name


def try_worker_counts(
    spec: PreprocessSpec, counts: Sequence[int], max_documents: int
) -> Iterator[str]:
    """Convert the first documents once with each number of workers; yield a line for each.

    The last line names the fastest. The output goes to a directory next to the final output (or,
    without one, to that for temporary files), which is removed.

    Raises:
        ConfigError: a number is below 1.
        DataError: there is no document that can be read twice, or the disk is full.
    """
    if min(*counts, max_documents) < 1:
        raise ConfigError("--workers-to-check and --max-documents: give 1 or more")
    if spec.chats:
        raise ConfigError("--find-optimal-num-workers tries texts, not --conversations")
    require_columns(spec)
    beside = Path(spec.output_prefix).absolute().parent
    with write_errors_name(beside), TemporaryDirectory(dir=beside, prefix="workers-") as folder:
        sample = Path(folder, "sample.jsonl")
        with sample.open("w", encoding="utf-8") as file:
            documents = 0
            for texts in islice(first_documents(spec), max_documents):
                file.write(json.dumps(dict(zip(spec.keys, texts, strict=True))) + "\n")
                documents += 1
        if not documents:
            raise DataError("--find-optimal-num-workers needs documents in files, not in a pipe")
        trial = replace(
            spec,
            inputs=(str(sample),),
            text=None,
            output_prefix=str(Path(folder, "trial")),
            resume=False,
            bad_lines_path=None,
            log_interval=documents + 1,
            # Several shards for each worker: one of the default size would keep one worker busy.
            shard_bytes=max(sample.stat().st_size // (4 * max(counts)), 1),
        )
        seconds = {}
        for count in dict.fromkeys(counts):
            started_at = time.monotonic()
            preprocess(replace(trial, workers=count))
            seconds[count] = time.monotonic() - started_at
            yield (
                f"--workers {count}: {documents} documents in {seconds[count]:.1f} s, "
                f"{documents / seconds[count]:.0f} documents/s"
            )
    yield f"fastest: --workers {min(seconds, key=lambda count: seconds[count])}"
