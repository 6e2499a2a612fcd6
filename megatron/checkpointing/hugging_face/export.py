"""Exporter to Hugging Face transformers: converts weights, and compares the logits of both models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.compare import labels_in
from megatron.checkpointing.conversion.export import Export, ExportOptions
from megatron.checkpointing.conversion.model_folder import write_weights
from megatron.checkpointing.conversion.network import (
    parameters_of,
    require_parameters,
)
from megatron.checkpointing.hugging_face.families.family import Family, Part
from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.hugging_face.logit_check import (
    LogitDifference,
    compare,
    require_equal,
    sample_tokens,
)
from megatron.checkpointing.hugging_face.model_card import model_card
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.parameter_names import is_buffer, is_of_vocabulary
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.common.errors import DataError, WrongDataError
from megatron.common.registry import EXPORTERS
from megatron.config.architecture.architecture import network_of
from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.dtypes import TORCH_DTYPES
from megatron.tokenizer.hugging_face_files import special_ids, write_hugging_face_files
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True)
class ExportResult:
    """Result of an export.

    Args:
        tokenizer: why none was written; "" if it was.
        chat_template: origin of the template written; "" if none was.
        remaining: difference from the network that was trained, where transformers' model computes
            another; None where it does not.
    """

    family: Family
    dtype: str
    tokenizer: str
    measured: Sequence[LogitDifference]
    chat_template: str = ""
    remaining: LogitDifference | None = None

    def __str__(self) -> str:
        lines = [f"{self.family.architecture} in {self.dtype}", *map(str, self.measured)]
        if self.remaining:
            lines.append(f"against the network that was trained: {self.remaining}")
        if self.chat_template:
            lines.append(f"its chat template is {self.chat_template}")
        if self.tokenizer:
            lines.append(f"it holds no tokenizer: {self.tokenizer}")
        return "\n".join(lines)


@EXPORTERS.register("transformers")
def export_to_transformers(job: Export, folder: Path) -> ExportResult:
    """Write a model of transformers to `folder`, once both models compute the same logits.

    Memory: one file of weights and a parameter; while comparing, one fp32 model.

    Raises:
        CheckpointError: no architecture fits the network, the checkpoint is damaged, or the logits
            differ.
        DataError: the tokenizer has another vocabulary, `options.chat_template` is given but no
            tokenizer can be written, or it is not the template of the training.
    """
    dtype, options, manifest = job.dtype, job.options, job.manifest
    spec = with_label_names(job.spec, manifest)
    tokenizer = job.tokenizer
    family = family_of(spec, options.model_type)
    _require_same_vocabulary(tokenizer, spec, manifest)
    trained_with = chat_template_of(manifest)
    if options.chat_template not in ("", trained_with) and trained_with:
        _require_replacement_flag(options)
    template = options.chat_template or trained_with
    write_model(folder, spec, family, job.checkpoint, dtype, max_bytes=options.max_shard_bytes)
    _write_json(folder / "config.json", _config(spec, family, dtype, tokenizer))
    if network_of(spec).service == "prompts":
        _write_json(folder / "generation_config.json", _generation_config(spec, tokenizer))
    no_tokenizer = write_hugging_face_files(
        folder,
        tokenizer,
        job.tokenizer_arguments,
        max_length=spec.positions.max_position_embeddings,
    )
    if template:
        _write_template(folder, template, no_tokenizer if options.chat_template else "")
    measured, remaining = _verify(job, folder, spec, family) if options.verifies else ([], None)
    origin = _template_origin(template, trained_with)
    card = model_card(
        manifest,
        spec,
        family,
        dtype=dtype,
        measured=measured,
        remaining=remaining,
        tokenizer=no_tokenizer,
        chat_template=origin,
        for_release=options.for_release,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return ExportResult(family, dtype, no_tokenizer, measured, origin, remaining)


def _verify(
    job: Export, folder: Path, spec: ModelSpec, family: Family
) -> tuple[list[LogitDifference], LogitDifference | None]:
    """Compare the logits with the model in `folder`; return `measured` and `remaining`.

    Raises:
        CheckpointError: they differ.
    """
    computed = family.computes(spec)
    against = partial(
        compare,
        checkpoint=job.checkpoint,
        folder=folder,
        tokens_bs=sample_tokens(spec, job.tokenizer),
        stored=job.dtype,
        auto_class=family.auto_class,
    )
    measured = against(computed)
    require_equal(measured)
    return measured, against(spec)[0] if computed != spec else None


def with_label_names(spec: ModelSpec, manifest: Manifest) -> ModelSpec:
    """Return the network with the names of a GLUE task's classes, which are not in its checkpoint."""
    return network_of(spec).with_labels(spec, labels_in(manifest.plan)) if spec.head else spec


def chat_template_of(manifest: Manifest) -> str:
    """Return the chat template of the conversations that a model was trained on; "" if unknown."""
    return manifest.data.chat_template


def _template_origin(template: str, trained_with: str) -> str:
    """Describe the origin of the chat template; "" if there is none."""
    if not template:
        return ""
    if template == trained_with:
        return "that of the training conversations"
    return "another than that of the training conversations" if trained_with else "as given"


def _require_replacement_flag(options: ExportOptions) -> None:
    if not options.replaces_template:
        raise WrongDataError(
            "--chat-template differs from the template of the training conversations; leave it out "
            "to write the training template, or add --replace-chat-template"
        )


def _write_template(folder: Path, template: str, no_tokenizer: str) -> None:
    if no_tokenizer:
        raise DataError(
            f"--chat-template goes with a tokenizer, and none is written: {no_tokenizer}"
        )
    # This file takes precedence over a template in the tokenizer's other files.
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _require_same_vocabulary(tokenizer: Tokenizer, spec: ModelSpec, manifest: Manifest) -> None:
    # With --true-vocab-size the network has rows that no token of the tokenizer uses.
    has_more_rows = manifest.tokenizer.true_vocab_size is not None
    fits = tokenizer.vocab_size <= spec.vocabulary.vocab_size
    if tokenizer.vocab_size != spec.vocabulary.vocab_size and not (has_more_rows and fits):
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the network was "
            f"trained with {spec.vocabulary.vocab_size}: give the training tokenizer"
        )


def write_model(
    folder: Path,
    spec: ModelSpec,
    family: Family,
    checkpoint: FullCheckpoint,
    dtype: str,
    *,
    max_bytes: int,
) -> None:
    """Write the weights by transformers' names to safetensors files.

    Memory: the weights of one file, and a parameter.

    Raises:
        CheckpointError: the weights do not fit `spec`.
    """
    wanted = parameters_of(spec)
    require_parameters(wanted, checkpoint)
    shapes = {
        name: tensor.shape
        for part in family.parts(spec)
        for name, tensor in _split(part, wanted[part.ours], spec)
    }
    tensors = (
        named
        for part in family.parts(spec)
        for named in _split(part, checkpoint.parameters[part.ours].weight.all(), spec)
    )
    exact = {name for part in family.parts(spec) if is_buffer(part.ours) for name in part.theirs}
    write_weights(folder, shapes, tensors, TORCH_DTYPES[dtype], max_bytes=max_bytes, exact=exact)


def _split(part: Part, weight: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield transformers' tensors of one parameter by name, without padding of the vocabulary."""
    weight = weight[: spec.vocabulary.vocab_size] if is_of_vocabulary(part.ours) else weight
    yield from zip(part.theirs, part.mapping.to_hugging_face(weight), strict=True)


def _config(spec: ModelSpec, family: Family, dtype: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.config(spec),
        "vocab_size": spec.vocabulary.vocab_size,
        "tie_word_embeddings": spec.vocabulary.tied_embeddings,
        "initializer_range": spec.init_std,
        # Known to all versions.
        "torch_dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
        **special_ids(tokenizer),
    }


def _generation_config(spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, int | None]:
    """Build generation_config.json; learned positions limit the length."""
    positions = spec.positions
    is_learned = positions.position_embedding == "learned"
    ends = {"max_length": positions.max_position_embeddings} if is_learned else {}
    return {**special_ids(tokenizer), **ends}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
