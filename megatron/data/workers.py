"""Blocks through many processes, in order, with a bound on what is under way."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import ClassVar

from megatron.data.block_encoder import Encoded, Encoder, EncodingRules
from megatron.data.chat_encoder import block_encoder
from megatron.data.inputs import Block
from megatron.errors import MegatronError

BLOCKS_PER_WORKER = 3  # read ahead, so that a slow block does not leave the others idle


class _Worker:
    """What a worker process keeps from one block to the next."""

    encode: ClassVar[Callable[[Block], Encoded]]


def encoded_by_workers(
    blocks: Iterable[Block],
    workers: int,
    make_encoder: Callable[[], Encoder],
    rules: EncodingRules,
    *,
    max_bytes: int,
) -> Iterator[Encoded]:
    """Yield the encoded blocks in order.

    Args:
        max_bytes: of text under way at a time; a block of more goes alone.

    Raises:
        MegatronError: a worker was killed.
    """
    # spawn: a fork would copy locks that other threads of this process may hold.
    executor = ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(make_encoder, rules, workers),
    )
    pending: deque[tuple[Future[Encoded], int]] = deque()
    held = 0
    try:
        for block in blocks:
            size = len(block.data or b"") if block.rows else block.end - block.start
            while pending and held + size > max_bytes:
                future, released = pending.popleft()
                yield future.result()
                held -= released
            pending.append((executor.submit(_encode_in_worker, block), size))
            held += size
            if len(pending) >= workers * BLOCKS_PER_WORKER:
                future, released = pending.popleft()
                yield future.result()
                held -= released
        while pending:
            yield pending.popleft()[0].result()
    except BrokenProcessPool as error:
        raise MegatronError(
            "a worker process was killed, most often because memory ran out; "
            f"use fewer --workers than {workers} or a smaller --max-memory-mb"
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def end_with_parent() -> None:
    """See to it that this process ends when its parent is killed, and not when interrupted."""
    # The parent is interrupted as well, and ends the others in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def share_cores(num_processes: int) -> None:
    """See to it that this process, one of `num_processes`, starts only its share of threads.

    Without it, the tokenizers library would start as many in each as there are cores.
    """
    said = os.environ.get("RAYON_NUM_THREADS", "")
    num_threads = int(said) if said.isdigit() else 0
    num_threads = num_threads or len(os.sched_getaffinity(0))
    os.environ["RAYON_NUM_THREADS"] = str(max(num_threads // num_processes, 1))


def _start_worker(
    make_encoder: Callable[[], Encoder], rules: EncodingRules, num_workers: int
) -> None:
    end_with_parent()
    share_cores(num_workers)
    _Worker.encode = block_encoder(make_encoder(), rules)


def _encode_in_worker(block: Block) -> Encoded:
    return _Worker.encode(block)
