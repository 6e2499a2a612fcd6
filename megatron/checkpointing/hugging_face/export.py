"""A checkpoint in transformers' files: streamed, compared with the original, then published."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.hugging_face.families.family import Family, Part
from megatron.checkpointing.hugging_face.families.registry import family_of
from megatron.checkpointing.hugging_face.logit_check import (
    LogitDifference,
    compare,
    require_equal,
    sample_tokens,
)
from megatron.checkpointing.hugging_face.model_card import model_card
from megatron.checkpointing.hugging_face.model_folder import new_folder, write_weights
from megatron.checkpointing.hugging_face.network import (
    parameters_of,
    require_parameters,
    spec_of,
)
from megatron.checkpointing.manifest import Manifest
from megatron.checkpointing.resharding.adapters import merge_adapters, without_adapters
from megatron.checkpointing.resharding.sharded_tensor import FullCheckpoint
from megatron.checkpointing.resharding.universal import read_checkpoint
from megatron.common.errors import DataError, WrongDataError
from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.dtypes import TORCH_DTYPES
from megatron.tokenizer.hugging_face_files import special_ids, write_hugging_face_files
from megatron.tokenizer.types.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to export.

    Args:
        dtype: number format of the files; None for that of the training.
        max_shard_bytes: size of a file of weights.
        model_type: the architecture; None for the first that fits.
        chat_template: the written tokenizer's; "" for that of the training conversations, or else
            the one that the tokenizer has, if any.
        replaces_template: whether `chat_template` may differ from that of the training.
        verifies: whether both models are run and compared.
        for_release: whether the card leaves out how far the model was trained.
    """

    dtype: str | None = None
    max_shard_bytes: int = 5_000_000_000
    model_type: str | None = None
    chat_template: str = ""
    replaces_template: bool = False
    verifies: bool = True
    for_release: bool = False


@dataclass(frozen=True)
class ExportResult:
    """What was written, why there is no tokenizer if so, and how equal the model is.

    Args:
        chat_template: where the written template is from; "" if none was written.
    """

    family: Family
    dtype: str
    tokenizer: str
    measured: Sequence[LogitDifference]
    chat_template: str = ""


def export(
    source: Path,
    manifest: Manifest,
    output: Path,
    tokenizer: Tokenizer,
    tokenizer_wishes: Mapping[str, Any],
    wishes: ExportOptions,
) -> ExportResult:
    """Write the model of the checkpoint in `source` to `output`, which must be new or empty.

    Adapters are put into the weights. It is written beside `output` and renamed when both models
    have been found to compute the same.

    Memory: while writing, one file's weights and a parameter; while comparing, one model in 32 bits.

    Args:
        tokenizer_wishes: what `tokenizer` was made from.

    Raises:
        CheckpointError: no architecture expresses the network, `source` is damaged, `output`
            cannot be written to, or the models differ; nothing is left of what was written.
        DataError: the tokenizer has another vocabulary, or is not written though its template is
            asked for, or the template is not that of the training.
    """
    saved = spec_of(manifest.plan["model"])
    spec = without_adapters(saved)
    family = family_of(spec, wishes.model_type)
    dtype = wishes.dtype or manifest.plan["precision"]["dtype"]
    _require_same_vocabulary(tokenizer, spec, manifest)
    trained_with = chat_template_of(manifest)
    if wishes.chat_template not in ("", trained_with) and trained_with:
        _require_replacing(wishes)
    template = wishes.chat_template or trained_with
    with new_folder(output) as staging:
        whole = merge_adapters(saved, read_checkpoint(source, manifest, optimizer=False))
        write_model(staging, spec, family, whole, dtype, max_bytes=wishes.max_shard_bytes)
        _write_json(staging / "config.json", _config(spec, family, dtype, tokenizer))
        _write_json(staging / "generation_config.json", _generation_config(spec, tokenizer))
        no_tokenizer = write_hugging_face_files(
            staging, tokenizer, tokenizer_wishes, max_length=spec.max_position_embeddings
        )
        if template:
            _write_template(staging, template, no_tokenizer if wishes.chat_template else "")
        measured = _measured(spec, whole, staging, tokenizer, dtype) if wishes.verifies else []
        card = model_card(
            manifest,
            spec,
            family,
            dtype=dtype,
            measured=measured,
            tokenizer=no_tokenizer,
            chat_template=_origin_of(template, trained_with),
            for_release=wishes.for_release,
        )
        (staging / "README.md").write_text(card, encoding="utf-8")
    return ExportResult(family, dtype, no_tokenizer, measured, _origin_of(template, trained_with))


def chat_template_of(manifest: Manifest) -> str:
    """Return the chat template of the conversations that a model was trained on; "" if unknown."""
    return str(manifest.plan.get("data", {}).get("chat_template", ""))


def _origin_of(template: str, trained_with: str) -> str:
    """Return where a written template is from, in words; "" if none is written."""
    if not template:
        return ""
    if template == trained_with:
        return "that of the training conversations"
    return "another than that of the training conversations" if trained_with else "as given"


def _require_replacing(wishes: ExportOptions) -> None:
    if not wishes.replaces_template:
        raise WrongDataError(
            "--chat-template is another than that of the conversations that the model was trained "
            "on; leave it out to write that one, or add --replace-chat-template"
        )


def _write_template(folder: Path, template: str, no_tokenizer: str) -> None:
    if no_tokenizer:
        raise DataError(
            f"--chat-template goes with a tokenizer, and none is written: {no_tokenizer}"
        )
    # This file goes before a template in any other file of the tokenizer.
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _require_same_vocabulary(tokenizer: Tokenizer, spec: ModelSpec, manifest: Manifest) -> None:
    # With --true-vocab-size the network has rows that no token of the tokenizer uses.
    has_more_rows = manifest.config["tokenizer"].get("true_vocab_size") is not None
    fits = tokenizer.vocab_size <= spec.vocab_size
    if tokenizer.vocab_size != spec.vocab_size and not (has_more_rows and fits):
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens and the network was "
            f"trained with {spec.vocab_size}: give that of the training"
        )


def write_model(
    folder: Path,
    spec: ModelSpec,
    family: Family,
    whole: FullCheckpoint,
    dtype: str,
    *,
    max_bytes: int,
) -> None:
    """Write the weights in transformers' names and order to `folder`.

    Memory: the weights of one file, and a parameter.

    Raises:
        CheckpointError: the weights are not those of `spec`.
    """
    wanted = parameters_of(spec)
    require_parameters(wanted, whole)
    shapes = {
        name: tensor.shape
        for part in family.parts(spec)
        for name, tensor in _apart(part, wanted[part.ours], spec)
    }
    tensors = (
        named
        for part in family.parts(spec)
        for named in _apart(part, whole.parameters[part.ours].weight.all(), spec)
    )
    write_weights(folder, shapes, tensors, TORCH_DTYPES[dtype], max_bytes=max_bytes)


def _apart(part: Part, weight: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of transformers' with their names, rows of padding left out."""
    weight = weight[: spec.vocab_size] if _is_table(part) else weight
    yield from zip(part.theirs, part.mapping.to_hugging_face(weight), strict=True)


def _is_table(part: Part) -> bool:
    return part.ours.endswith("word_embeddings.weight")


def _config(spec: ModelSpec, family: Family, dtype: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.config(spec),
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
        "initializer_range": spec.init_std,
        # The name that all versions know.
        "torch_dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
        **special_ids(tokenizer),
    }


def _generation_config(spec: ModelSpec, tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return how text is generated; learned positions end, so generation ends with them."""
    ends = {"max_length": spec.max_position_embeddings}
    return {**special_ids(tokenizer), **(ends if spec.position_embedding == "learned" else {})}


def _measured(
    spec: ModelSpec, whole: FullCheckpoint, folder: Path, tokenizer: Tokenizer, dtype: str
) -> list[LogitDifference]:
    measured = compare(spec, whole, folder, sample_tokens(spec, tokenizer), dtype)
    require_equal(measured)
    return measured


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
