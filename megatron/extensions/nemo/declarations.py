"""NeMo's files, as far as they need no torch."""

from pathlib import Path

from megatron.checkpointing.megatron_lm.detect import Format
from megatron.common.registry import EXPORTERS, LOADERS


def _recognises(path: Path) -> bool:
    return (
        path.suffix == ".nemo"
        or path.name.startswith("mp_autoresume")
        or any(path.glob("mp_rank_*/mp_autoresume*.ckpt"))
    )


LOADERS.declare(
    "nemo",
    "megatron.extensions.nemo.checkpoints",
    Format(
        program="NeMo",
        recognises=_recognises,
        tokenizer_in="megatron.extensions.nemo.checkpoints.tokenizer_in",
    ),
)
for _name in ("nemo", "nemo-autoresume"):
    EXPORTERS.declare(_name, "megatron.extensions.nemo.checkpoints_export", None)
