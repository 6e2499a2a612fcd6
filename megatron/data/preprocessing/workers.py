"""Blocks through many processes, in order, with a bound on what is under way."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from megatron.common.errors import MegatronError
from megatron.common.process_pool import LostWorkerError, map_in_processes, share_cores
from megatron.data.preprocessing.block_encoder import Encoded, Encoder, EncodingRules
from megatron.data.preprocessing.chat_encoder import block_encoder
from megatron.data.readers.inputs import Block


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
    make_function = partial(_build, make_encoder, rules, workers)
    try:
        yield from map_in_processes(
            make_function, blocks, workers, size_of=_size_of, max_size=max_bytes
        )
    except LostWorkerError as error:
        raise MegatronError(
            f"{error}; use fewer --workers than {workers} or a smaller --max-memory-mb"
        ) from error


def _size_of(block: Block) -> int:
    return len(block.data or b"") if block.rows else block.end - block.start


def _build(
    make_encoder: Callable[[], Encoder], rules: EncodingRules, num_workers: int
) -> Callable[[Block], Encoded]:
    share_cores(num_workers)
    return block_encoder(make_encoder(), rules)
