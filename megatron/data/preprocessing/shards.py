"""One conversion by several processes that share nothing but a file system."""

import fcntl
from dataclasses import replace

from megatron.common.errors import DataError
from megatron.data.preprocessing.assemble import (
    Written,
    forget_assembled,
    publish_staged,
    require_assembled_of,
    require_parts_of_one_conversion,
    was_assembled,
)
from megatron.data.preprocessing.file_rendezvous import meet, say_done, wait_for_shards
from megatron.data.preprocessing.preprocess import (
    publish_parts,
    remove_published,
    stage_lock,
    stage_part,
)
from megatron.data.preprocessing.preprocess_spec import Conversion, build_rules, require_columns
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.shard_writer import require_as_many_parts
from megatron.data.readers.inputs import split_sources
from megatron.data.token_files.publish import write_errors_name


def stage_shard(conversion: Conversion, index: int, num_shards: int) -> None:
    """Convert part `index` of `num_shards`; `merge_shards` makes the files of all parts.

    On resuming there is nothing to do where a merge has assembled all parts already.

    Raises:
        DataError: an input cannot be read, a line is not as expected, the disk is full, or on
            resuming what is there was made with other wishes.
        MegatronError: a process was killed.
    """
    conversion = replace(conversion, workers=conversion.workers * conversion.partitions)
    conversion = replace(conversion, partitions=1)
    root = conversion.root
    with write_errors_name(root):
        root.mkdir(exist_ok=True)
    with stage_lock(root, fcntl.LOCK_SH):
        require_columns(conversion)
        rules = build_rules(conversion, conversion.make_encoder())
        if not conversion.resume:
            forget_assembled(root)
        elif was_assembled(root):
            require_assembled_of(conversion, rules, num_shards)
            return
        else:
            require_as_many_parts(root, num_shards)
        sources = split_sources(conversion.sources(), index, num_shards)
        total_bytes = sum(source.num_bytes for source in sources)
        progress = Progress(total_bytes, log_interval=conversion.log_interval)

        def report(documents: int, tokens: int, num_bytes: int, earlier: bool) -> None:
            count = progress.take_up if earlier else progress.add
            count(documents=documents, tokens=tokens, num_bytes=num_bytes)

        try:
            stage_part(conversion, rules, index, num_shards, report)
        finally:
            progress.close()


def merge_shards(conversion: Conversion, num_shards: int) -> list[Written]:
    """Make the token files of all shards, which are then removed.

    Raises:
        DataError: a shard is missing, not finished, or of other wishes or inputs than these.
    """
    root = conversion.root
    if not root.is_dir():
        raise DataError(f"there are no shards to merge: {root} does not exist")
    with stage_lock(root, fcntl.LOCK_EX):
        rules = build_rules(conversion, conversion.make_encoder())
        if was_assembled(root):
            require_assembled_of(conversion, rules, num_shards)
            written = publish_staged(root)
        else:
            require_parts_of_one_conversion(conversion, rules, num_shards)
            written = publish_parts(conversion, rules, num_shards)
        remove_published(root)
    return written


def convert_together(
    conversion: Conversion, rank: int, num_ranks: int, *, timeout_s: float, merge_workers: int
) -> list[Written]:
    """Convert the shard of this rank of a launch; rank 0 then joins all, and returns the files.

    Args:
        timeout_s: how long to wait for ranks of which nothing is seen.
        merge_workers: processes of rank 0 that copy.

    Communication: waits for every other rank at the start, and on rank 0 at the end, through files.

    Raises:
        DataError: as `stage_shard`, or a rank does not come or does not go on.
        MegatronError: a process was killed.
    """
    root = conversion.root
    launch = meet(root, rank, num_ranks, timeout_s)
    stage_shard(conversion, rank, num_ranks)
    say_done(root, rank, launch)
    if rank:
        return []
    wait_for_shards(root, num_ranks, launch, timeout_s)
    return merge_shards(replace(conversion, workers=merge_workers, partitions=1), num_ranks)
