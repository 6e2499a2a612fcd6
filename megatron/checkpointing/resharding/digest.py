"""What a state of training is, in a few letters, whatever its layout."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.checkpointing.manifest import Manifest, damage
from megatron.checkpointing.resharding.layouts import read_whole
from megatron.checkpointing.resharding.sharded_tensor import Whole, WholeCheckpoint
from megatron.checkpointing.resharding.universal import is_universal, read_universal
from megatron.common.errors import CheckpointError

_ROWS = 4096  # read in one go


def read_any(
    folder: Path, manifest: Manifest, *, optimizer: bool = True, verify: bool = True
) -> WholeCheckpoint:
    """Return everything in a checkpoint with a layout or without one.

    Args:
        optimizer: whether its states are wanted, where they were saved; see read_whole.
        verify: whether to compare files with the manifest: those with a layout when they are read,
            all others at once.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    if is_universal(manifest):
        if verify and (problems := damage(folder, manifest.files)):
            raise CheckpointError("; ".join(problems))
        return read_universal(folder, manifest)
    saved = manifest.plan["checkpoint"]["saves_optimizer"]
    return read_whole(folder, manifest, optimizer=optimizer and saved, verify=verify)


def digests(whole: WholeCheckpoint, vocab_size: int) -> Iterator[tuple[str, str]]:
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


def _digest(tensor: Whole, rows: int) -> str:
    digest = hashlib.sha256(str((rows, *tensor.shape[1:])).encode())
    for start in range(0, rows, _ROWS):
        block = tensor.rows(start, min(start + _ROWS, rows))
        digest.update(block.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
