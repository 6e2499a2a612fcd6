"""Export of LoRA adapters to Hugging Face PEFT."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpointing.conversion.adapters import without_adapters
from megatron.checkpointing.conversion.model_folder import new_folder
from megatron.checkpointing.hugging_face.families.family import Family
from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.hugging_face.families.tensor_mapping import (
    StackedTransposed,
    Transposed,
)
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.parameter_names import ParameterNames
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import CheckpointError
from megatron.config.network.lora import LoraSpec
from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.linear import DOWN, UP

_TASKS = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
"""Task types of PEFT by the class of transformers.

Other heads have none: PEFT's class for question answering leaves out token types.
"""


def export_adapters(
    source: Path, manifest: Manifest, output: Path, *, base: str, model_type: str | None = None
) -> Family:
    """Export adapters to adapter_config.json and adapter_model.safetensors in a new or empty folder.

    A fused matrix that is several ones in transformers gets as many adapters, which share lora_A;
    the model computes the same. The head of a downstream task is stored in full.

    Args:
        base: folder or hub name of the base model.
        model_type: the architecture; None for the first that fits.

    Raises:
        CheckpointError: the checkpoint has no adapters, no architecture fits its network, or
            `output` is not empty or cannot be written to; no partial output is left.
    """
    spec = manifest.spec
    if spec.lora is None:
        raise CheckpointError(f"{source} has no adapters: it was trained without --lora-rank")
    family = family_of(without_adapters(spec), model_type)
    is_transposed = any(
        _is_transposed(part.mapping) for part in family.parts(without_adapters(spec))
    )
    with new_folder(output) as staging:
        checkpoint = read_checkpoint(source, manifest, optimizer=False)
        tensors, head = (dict(some(family, spec, checkpoint)) for some in (_tensors, _head_tensors))
        save_file(tensors | head, staging / "adapter_model.safetensors", metadata={"format": "pt"})
        config = _config(
            spec.lora,
            base=base,
            task=_TASKS.get(family.auto_class),
            modules={".".join(name.split(".")[-4:-2]) for name in tensors},
            head={".".join(name.split(".")[2:-1]) for name in head},
            is_transposed=is_transposed,
        )
        text = json.dumps(config, indent=2) + "\n"
        (staging / "adapter_config.json").write_text(text, encoding="utf-8")
    return family


def _config(
    lora: LoraSpec,
    *,
    base: str,
    task: str | None,
    modules: set[str],
    head: set[str],
    is_transposed: bool,
) -> dict[str, Any]:
    stored = {"modules_to_save": sorted(head)} if head else {}
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
        **stored,
    }


def _tensors(
    family: Family, spec: ModelSpec, checkpoint: FullCheckpoint
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of all linear layers by PEFT's names, in fp32."""
    for part in family.parts(without_adapters(spec)):
        stem = part.ours.removesuffix("weight")
        if f"{stem}{DOWN}" not in checkpoint.parameters:
            continue
        down, up = (checkpoint.parameters[stem + name].weight.all().float() for name in (DOWN, UP))
        # B has the rows of the weight, so the mapping applies to it; its columns are the rank.
        ups = part.mapping.to_hugging_face(up)
        for theirs, piece in zip(part.theirs, ups, strict=True):
            module = theirs.removesuffix(".weight")
            if family.module_prefix:
                module = module.replace(family.prefix, family.module_prefix, 1)
            module = f"base_model.model.{module}"
            yield f"{module}.{DOWN}.weight", down.clone()
            rows = piece.T if _is_transposed(part.mapping) else piece
            yield f"{module}.{UP}.weight", rows.to(torch.float32, copy=True).contiguous()


def _head_tensors(
    family: Family, spec: ModelSpec, checkpoint: FullCheckpoint
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a downstream head by PEFT's names, in fp32."""
    names = ParameterNames.of(spec)
    for part in family.parts(without_adapters(spec)) if spec.head else ():
        if names.module(part.ours).startswith(("classification_head", "pooler")):
            (theirs,) = part.theirs
            weight = checkpoint.parameters[part.ours].weight.all()
            yield f"base_model.model.{theirs}", weight.to(torch.float32, copy=True)


def _is_transposed(mapping: object) -> bool:
    return isinstance(mapping, Transposed | StackedTransposed)
