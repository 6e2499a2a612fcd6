"""Exporter to safetensors files with our parameter names, for networks of any kind."""

import json
from pathlib import Path

from megatron.checkpointing.conversion.export import Export
from megatron.checkpointing.conversion.model_folder import write_weights
from megatron.checkpointing.parameter_names import ParameterNames, is_buffer, is_of_vocabulary
from megatron.common.registry import EXPORTERS
from megatron.config.network.model_spec import flat
from megatron.tensor_parallel.dtypes import TORCH_DTYPES


@EXPORTERS.register("safetensors")
def export_to_safetensors(job: Export, folder: Path) -> str:
    """Write the weights by module names, without padding of the vocabulary, and the network's spec next to them.

    config.json holds the fields of ModelSpec.

    Memory: one file of weights.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    spec = job.manifest.spec
    names, rows = ParameterNames.of(spec), job.spec.vocabulary.vocab_size
    shapes = {}
    for name, parameter in job.checkpoint.parameters.items():
        first, *others = parameter.weight.shape
        kept = min(first, rows) if is_of_vocabulary(name) else first
        shapes[names.module(name)] = (kept, *others)
    tensors = (
        (module, weight[: shapes[module][0]])
        for name, weight in job.weights()
        if (module := names.module(name))
    )
    dtype = TORCH_DTYPES[job.dtype]
    exact = {names.module(name) for name in job.checkpoint.parameters if is_buffer(name)}
    write_weights(
        folder, shapes, tensors, dtype, max_bytes=job.options.max_shard_bytes, exact=exact
    )
    text = json.dumps(flat(spec), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    return f"safetensors in {job.dtype}"
