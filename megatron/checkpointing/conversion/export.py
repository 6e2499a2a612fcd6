"""Export a checkpoint to another format: exporters by name, which write to a staging folder."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.conversion.adapters import merge_adapters, without_adapters
from megatron.checkpointing.conversion.model_folder import new_folder
from megatron.checkpointing.conversion.predictions import drop_predictions, without_predictions
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.registry import EXPORTERS, OwnFlags
from megatron.config.network.model_spec import ModelSpec
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export.

    Args:
        dtype: of the files; None for the dtype of the training.
        max_shard_bytes: size of a file of weights.
        model_type: the architecture; None for the first that fits.
        chat_template: to write with the tokenizer; "" for the template of the training
            conversations, or else the tokenizer's template, if any.
        replaces_template: whether `chat_template` may differ from the one of the training.
        verifies: whether to run both models and compare their logits.
        drops_predictions: whether the layers of multi-token prediction are left out.
        for_release: whether the model card leaves out the training progress.
    """

    dtype: str | None = None
    max_shard_bytes: int = 5_000_000_000
    model_type: str | None = None
    chat_template: str = ""
    replaces_template: bool = False
    verifies: bool = True
    drops_predictions: bool = False
    for_release: bool = False


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint to export, as exporters get it; LoRA adapters are merged into its weights.

    Args:
        source: folder of the checkpoint.
        tokenizer_arguments: of build_tokenizer, for `tokenizer`.
    """

    source: Path
    manifest: Manifest
    tokenizer: Tokenizer
    tokenizer_arguments: Mapping[str, Any]
    options: ExportOptions

    @cached_property
    def spec(self) -> ModelSpec:
        """The network."""
        spec = without_adapters(self.manifest.spec)
        return without_predictions(spec) if self.options.drops_predictions else spec

    @cached_property
    def dtype(self) -> str:
        """Dtype of the files."""
        return self.options.dtype or self.manifest.precision.dtype

    @cached_property
    def checkpoint(self) -> FullCheckpoint:
        """Unsharded weights, each read on access."""
        full = read_checkpoint(self.source, self.manifest, optimizer=False)
        merged = merge_adapters(self.manifest.spec, full)
        if not self.options.drops_predictions:
            return merged
        return drop_predictions(without_adapters(self.manifest.spec), merged)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and unsharded weight of each parameter, one in memory at a time."""
        for name, parameter in self.checkpoint.parameters.items():
            yield name, parameter.weight.all()


def export(
    job: Export, output: Path, exporter: str = "transformers", own_flags: OwnFlags = ()
) -> Any:
    """Export to `output`, a new or empty folder; return the exporter's result.

    The exporter writes to a staging folder, which is renamed when it is done.

    Args:
        exporter: a name in EXPORTERS.
        own_flags: the flags of a plugin's exporter.

    Raises:
        CheckpointError: the checkpoint is damaged, `output` cannot be written to, or what the
            exporter raises; no partial output is left.
    """
    write = EXPORTERS.get(exporter, own_flags)
    with new_folder(output) as staging:
        return write(job, staging)
