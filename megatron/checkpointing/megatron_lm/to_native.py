"""From what another program left to a checkpoint of ours: the wishes, the plan, the manifest."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.checkpointing.hugging_face.import_manifest import manifest_of_converted
from megatron.checkpointing.hugging_face.network import parameters_of, saved_spec
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.megatron_lm.foreign_checkpoint import ForeignCheckpoint
from megatron.checkpointing.resharding.sharded_tensor import Made, WholeCheckpoint, WholeParameter
from megatron.common.errors import CheckpointError
from megatron.config.config import Config
from megatron.config.parallelism.layout import ParallelConfig
from megatron.config.parallelism.zero import DeepSpeedConfig
from megatron.config.plan import plan
from megatron.config.run.checkpoint import CheckpointConfig
from megatron.config.run.logging import LoggingConfig


def native_manifest(found: ForeignCheckpoint, config: Config, *, vocab_size: int) -> Manifest:
    """Return the manifest, without files, of what was `found`, with the wishes `config`.

    Raises:
        ConfigError: there is no such network.
        CheckpointError: it has other parameters.
    """
    tokenizer = config.tokenizer
    if tokenizer.pad_vocab_size_to is None:
        divisor = tokenizer.make_vocab_size_divisible_by
        tokenizer = replace(
            tokenizer,
            pad_vocab_size_to=found.rows,
            make_vocab_size_divisible_by=1 if found.rows % divisor else divisor,
        )
    wishes = replace(
        config,
        tokenizer=tokenizer,
        # Of that run on its machine; what is written is for any layout.
        checkpoint=CheckpointConfig(),
        parallel=ParallelConfig(),
        deepspeed=DeepSpeedConfig(),
        logging=LoggingConfig(),
    )
    # "cuda": where weights of 16 bits are trained; nothing is.
    decided = plan(wishes, world_size=1, vocab_size=vocab_size, device="cuda")
    held = replace(decided.checkpoint, saves_optimizer=found.has_optimizer, saves_streams=False)
    # Those programs count padding, and so does a run that continues one of theirs.
    counts = decided.model.padded_vocab_size > decided.model.vocab_size
    model = replace(decided.model, padded_vocab_in_softmax=counts)
    decided = replace(decided, checkpoint=held, model=model)
    _require_names(set(found.whole.parameters), set(parameters_of(decided.model)), found.folder)
    return manifest_of_converted(wishes, decided, found.state)


def native_weights(found: ForeignCheckpoint, spec: Mapping[str, Any]) -> WholeCheckpoint:
    """Return the parameters of `found`, each compared in shape with the network when it is read.

    Args:
        spec: the network, as in a manifest's plan.
    """
    shapes = {name: tuple(p.shape) for name, p in parameters_of(saved_spec(spec)).items()}

    def read(name: str) -> WholeParameter:
        parameter, wanted = found.whole.parameters[name], shapes[name]
        if parameter.weight.shape != wanted:
            raise CheckpointError(
                f"{found.folder}: {name} is {list(parameter.weight.shape)}, and the network of its "
                f"arguments has {list(wanted)}; the flags of the network say what it is"
            )
        return parameter

    return replace(found.whole, parameters=Made({name: partial(read, name) for name in shapes}))


def _require_names(found: set[str], expected: set[str], folder: Path) -> None:
    """Refuse a checkpoint with other parameters than the network of its arguments has.

    Raises:
        CheckpointError: lists them.
    """
    if found != expected:
        raise CheckpointError(
            f"{folder} holds other parameters than the network of its arguments: missing "
            f"{sorted(expected - found)}, unexpected {sorted(found - expected)}"
        )
