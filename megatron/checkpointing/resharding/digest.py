"""Layout-independent hash of a training state: weights, optimizer states and step counts."""

import hashlib
from collections.abc import Iterable, Iterator

from megatron.checkpointing.parameter_names import is_of_vocabulary
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint, ShardedTensor

_ROWS = 4096  # per block


def digests(checkpoint: FullCheckpoint, vocab_size: int) -> Iterator[tuple[str, str]]:
    """Yield "parameter/state" and the SHA-256 of each tensor, sorted by name.

    Elements are hashed as fp32; padding of the vocabulary is left out.

    Memory: one block of rows.
    """
    for name, parameter in sorted(checkpoint.parameters.items()):
        vocabulary = is_of_vocabulary(name)
        for state, tensor in sorted(parameter.tensors.items()):
            rows = min(vocab_size, tensor.shape[0]) if vocabulary else tensor.shape[0]
            yield f"{name}/{state}", _digest(tensor, rows)
        if parameter.steps is not None:
            yield f"{name}/step", hashlib.sha256(str(float(parameter.steps)).encode()).hexdigest()


def digest_of(named: Iterable[tuple[str, str]]) -> str:
    """Hash the digests of all tensors into one."""
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
