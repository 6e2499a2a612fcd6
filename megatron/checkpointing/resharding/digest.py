"""What a state of training is, in a few letters, whatever its layout."""

import hashlib
from collections.abc import Iterable, Iterator

from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint, ShardedTensor

_ROWS = 4096  # read in one go


def digests(whole: FullCheckpoint, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield every tensor as "parameter/state" with its digest, in the order of the names.

    Numbers count as 32-bit floats. Rows of padding do not count.

    Memory: a block of rows.
    """
    for name, parameter in sorted(whole.parameters.items()):
        vocabulary = name.endswith("word_embeddings.weight")
        for state, tensor in sorted(parameter.tensors.items()):
            rows = min(vocab_size, tensor.shape[0]) if vocabulary else tensor.shape[0]
            yield f"{name}/{state}", _digest(tensor, rows)
        if parameter.steps is not None:
            yield f"{name}/step", hashlib.sha256(str(float(parameter.steps)).encode()).hexdigest()


def digest_of(named: Iterable[tuple[str, str]]) -> str:
    """Return the digest of digests."""
    total = hashlib.sha256()
    for name, digest in named:
        total.update(f"{name} {digest}\n".encode())
    return total.hexdigest()


def _digest(tensor: ShardedTensor, rows: int) -> str:
    digest = hashlib.sha256(str((rows, *tensor.shape[1:])).encode())
    for start in range(0, rows, _ROWS):
        block = tensor.rows(start, min(start + _ROWS, rows))
        digest.update(block.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
