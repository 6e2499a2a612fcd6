"""NeMo's BERTs with the head of a text task: .nemo archives and mp_autoresume checkpoints."""

import io
import json
import re
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpointing.export import Export
from megatron.checkpointing.megatron_lm.foreign_checkpoint import ForeignCheckpoint
from megatron.checkpointing.megatron_lm.megatron import found_in
from megatron.checkpointing.parameter_names import ParameterNames, is_of_vocabulary
from megatron.checkpointing.resharding.unpickle import read_foreign
from megatron.common.errors import CheckpointError, WrongCheckpointError
from megatron.common.registry import EXPORTERS
from megatron.config.network.model_spec import ModelSpec
from megatron.tensor_parallel.dtypes import TORCH_DTYPES

_ENCODER, _HEAD = "bert_model.language_model.", "classifier.mlp.layer"
_WEIGHTS, _VERSION, _CONFIG = (
    "model_weights.ckpt",
    "megatron_checkpoint_version.json",
    "_config.yaml",
)
_ENCODER_CONFIG = "encoder_config.json"
_VERSION_OF_ROWS = 3  # rows of queries, keys and values as here

_DAMAGES = (OSError, EOFError, tarfile.TarError, zlib.error)
"""Errors of an archive that is damaged, or is none."""

_TARGETS = {
    "token-classification": (
        "nemo.collections.nlp.models.token_classification.token_classification_model."
        "TokenClassificationModel"
    ),
    "question-answering": "nemo.collections.nlp.models.question_answering.qa_model.QAModel",
}
"""Classes of NeMo by the task of their head."""


def find(path: Path, *, heads: int | None = None) -> ForeignCheckpoint:
    """Read an archive, a mp_autoresume checkpoint, or a folder of mp_rank_XX with such; merge ranks.

    Args:
        heads: attention heads, for files that do not name them.

    Raises:
        CheckpointError: it is damaged, or its head is none of a network here.
    """
    if path.suffix != ".nemo":
        return _found(path, _rank_files(path), {}, heads=heads)
    with TemporaryDirectory() as folder:
        try:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
        except _DAMAGES as error:
            raise WrongCheckpointError(f"{path} is no archive of NeMo's: {error}") from error
        content = Path(folder)
        return _found(path, _rank_files(content), _settings(content), heads=heads)


def tokenizer_in(archive: Path) -> tuple[str, bytes]:
    """Return the type of the tokenizer of an archive, and its vocabulary.

    Raises:
        WrongCheckpointError: it is no archive, or has no vocabulary.
    """
    config, vocabulary = b"", b""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file and member.name.endswith(_CONFIG):
                    config = file.read()
                elif file and member.name.endswith("tokenizer.vocab_file"):
                    vocabulary = file.read()
        name = str((yaml.safe_load(config) or {}).get("tokenizer", {}).get("tokenizer_name"))
    except (*_DAMAGES, yaml.YAMLError) as error:
        raise WrongCheckpointError(f"{archive} is no archive of NeMo's: {error}") from error
    if not vocabulary:
        raise WrongCheckpointError(f"{archive} has no vocabulary: give model.tokenizer.vocab_file")
    is_cased = "cased" in name and "uncased" not in name
    return "BertWordPieceCase" if is_cased else "BertWordPieceLowerCase", vocabulary


def _rank_files(path: Path) -> list[Path]:
    """Return the file of each tensor-parallel rank: the weights, or of several checkpoints the last.

    Raises:
        WrongCheckpointError: there is none.
    """
    if path.is_file():
        return [path]
    folders = sorted(path.glob("mp_rank_*"))
    found = []
    for folder in folders or [path]:
        files = [folder / _WEIGHTS, *sorted(folder.glob("mp_autoresume*-last.ckpt"))]
        files += sorted(folder.glob("mp_autoresume*.ckpt"))
        found += [file for file in files if file.is_file()][:1]
    if not found or len(found) < len(folders):
        raise WrongCheckpointError(f"{path} lacks {_WEIGHTS} or mp_autoresume-last.ckpt of a rank")
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """Return the content of the small files of an archive.

    Raises:
        CheckpointError: one cannot be read.
    """
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        try:
            if file.name.endswith(_CONFIG):
                found["model"] = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            elif file.name.endswith((_ENCODER_CONFIG, _VERSION)):
                found |= json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise CheckpointError(
                f"{file.name} of the archive is not understood: {error}"
            ) from error
    return found


def _found(
    path: Path, files: Sequence[Path], settings: Mapping[str, Any], *, heads: int | None
) -> ForeignCheckpoint:
    """Return the network in the files of all ranks."""
    loaded = [read_foreign(file) for file in files]
    ranks = [
        {
            "model": _renamed(rank.get("state_dict", rank), path),
            "checkpoint_version": settings.get(
                "checkpoint_version", rank.get("checkpoint_version", 0)
            ),
        }
        for rank in loaded
    ]
    sizes = {str(name).replace("-", "_"): value for name, value in settings.items()}
    found = found_in(path, [ranks], heads=sizes.get("num_attention_heads") or heads)
    last = [rank for name, rank in ranks[0]["model"].items() if name.startswith("classification_")]
    layers, outputs = len(last) // 2, len(last[-1])
    model = settings.get("model", {})
    task = next((task for task, target in _TARGETS.items() if model.get("target") == target), "")
    task = task or ("question-answering" if (layers, outputs) == (1, 2) else "token-classification")
    labels = model.get("label_ids") or {str(number): number for number in range(outputs)}
    names = sorted(labels, key=lambda name: labels[name])
    flags = ["--task", task, "--train-data", "none", "--head-layers", str(layers)]
    # NeMo computes GELU in its exact form.
    flags += ["--gelu=erf"]
    if task == "token-classification":
        flags += ["--labels", *names]
    else:  # which has to leave room for a context
        positions = len(ranks[0]["model"]["language_model.embedding.position_embeddings.weight"])
        flags += ["--max-query-length", str(min(64, positions // 2))]
    return replace(found, flags=[*found.flags, *flags], objective=task)


def _renamed(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights of a rank by the names of Megatron-LM, and those of the head by ours.

    Raises:
        WrongCheckpointError: it is no BERT with a head on each token.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(_ENCODER):
            found[name.removeprefix("bert_model.")] = tensor
        elif match := re.fullmatch(rf"{re.escape(_HEAD)}(\d+)\.(weight|bias)", name):
            # Activations have the odd numbers.
            found[f"classification_head.{int(match[1]) // 2}.{match[2]}"] = tensor
    if not any(name.startswith("classification_head.") for name in found) or len(found) < 8:
        raise WrongCheckpointError(
            f"{path} holds no BERT of Megatron's with the head of token classification or question "
            "answering"
        )
    if "pooler" in "".join(found):
        found = {name: tensor for name, tensor in found.items() if ".pooler." not in name}
    return found


@EXPORTERS.register("nemo")
def export_to_nemo(job: Export, folder: Path) -> str:
    """Write an archive of NeMo's for one rank: weights, settings, vocabulary.

    Memory: the full weights.

    Raises:
        WrongCheckpointError: the network has no head on each token.
    """
    spec = job.spec
    if not spec.head_layers:
        raise WrongCheckpointError(
            "NeMo's archives hold networks of token classification and question answering; this one "
            "has another head, or those of pretraining"
        )
    task = "token-classification" if spec.labels else "question-answering"
    names = ParameterNames.of(job.manifest.plan["model"])
    dtype = TORCH_DTYPES[job.dtype]
    weights = {
        _name_in_nemo(names.module(name)): (
            weight[: spec.vocab_size] if is_of_vocabulary(name) else weight
        )
        .to(dtype)
        .contiguous()
        for name, weight in job.weights()
    }
    vocabulary = {token: number for number, token in enumerate(job.tokenizer.vocabulary().tokens)}
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    lower = job.tokenizer_arguments["tokenizer_type"] == "BertWordPieceLowerCase"
    name = f"megatron-bert-{'uncased' if lower else 'cased'}"
    files = {
        f"{name}_encoder_config.json": json.dumps(_sizes(spec)),
        "megatron_checkpoint_version.json": json.dumps({"checkpoint_version": _VERSION_OF_ROWS}),
        "model_config.yaml": yaml.safe_dump(_model_config(spec, task, name), sort_keys=False),
        "mp_rank_00/model_weights.ckpt": buffer.getvalue(),
        "tokenizer_vocab_dict.json": json.dumps(vocabulary),
        "tokenizer.vocab_file": "".join(f"{token}\n" for token in vocabulary),
    }
    archive = folder / f"{task}.nemo"
    with tarfile.open(archive, "w:gz") as tar:
        directory = tarfile.TarInfo("mp_rank_00")  # which NeMo counts
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(directory)
        for path, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    exact = spec.activation == "gelu_erf"
    notice = (
        "" if exact else "; NeMo computes GELU in its exact form, and this network in the other"
    )
    return f"{archive.name} in {job.dtype}{notice}"


def _name_in_nemo(module: str) -> str:
    """Return the name of a parameter in NeMo, given its module's."""
    if match := re.fullmatch(r"classification_head\.(\d+)\.(weight|bias)", module):
        return f"{_HEAD}{2 * int(match[1])}.{match[2]}"
    stack = "" if module.startswith("embedding.") else "encoder."
    return f"{_ENCODER}{stack}{module}"


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_layers": spec.num_layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "num_tokentypes": spec.num_token_types,
    }


def _model_config(spec: ModelSpec, task: str, name: str) -> dict[str, Any]:
    """Return model_config.yaml."""
    head = {"num_fc_layers": spec.head_layers, "fc_dropout": spec.head_dropout}
    if task == "question-answering":
        head = {"num_layers": spec.head_layers, "dropout": spec.head_dropout}
    sizes = {name: size for name, size in _sizes(spec).items() if name != "num_tokentypes"}
    return {
        "tokenizer": {"tokenizer_name": name, "vocab_file": "nemo:tokenizer.vocab_file"},
        "language_model": {"pretrained_model_name": name, "config": sizes},
        ("head" if spec.labels else "token_classifier"): {**head, "activation": "relu"},
        **({"label_ids": {label: i for i, label in enumerate(spec.labels)}} if spec.labels else {}),
        "target": _TARGETS[task],
    }
