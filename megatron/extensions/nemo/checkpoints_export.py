"""Exporters to NeMo: .nemo archives and mp_autoresume checkpoints of BERTs with the head of a text task."""

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron.checkpointing.conversion.export import Export
from megatron.checkpointing.expressed import not_expressed, plain_values
from megatron.checkpointing.parameter_names import ParameterNames, is_of_vocabulary
from megatron.common.errors import WrongCheckpointError
from megatron.common.registry import EXPORTERS
from megatron.config.flag_names import flag_setting
from megatron.config.network.model_spec import ModelSpec, flat
from megatron.extensions.nemo.checkpoints import (
    CONFIG,
    ENCODER,
    ENCODER_CONFIG,
    HEAD,
    LAST,
    TARGETS,
    VERSION,
    VOCABULARY,
    WEIGHTS,
)
from megatron.extensions.tasks.flags import HeadSpec
from megatron.tensor_parallel.dtypes import TORCH_DTYPES

_RANK = "mp_rank_00"
_VERSION_OF_ROWS = 3  # rows of queries, keys and values as here
_CLASS_LABELS = "class_labels.csv"


@EXPORTERS.register("nemo")
def export_to_nemo(job: Export, folder: Path) -> str:
    """Write an archive of NeMo's for one rank: weights, settings, vocabulary.

    Memory: the full weights.

    Raises:
        WrongCheckpointError: NeMo has no such head.
    """
    spec, task = job.spec, _task_of(job.spec)
    _require_expressed(spec)
    buffer = io.BytesIO()
    torch.save(_weights(job), buffer)
    vocabulary = {token: number for number, token in enumerate(job.tokenizer.vocabulary().tokens)}
    name = _pretrained_name(job)
    files = {
        f"{name}_{ENCODER_CONFIG}": json.dumps(_sizes(spec)),
        VERSION: json.dumps({"checkpoint_version": _VERSION_OF_ROWS}),
        CONFIG: yaml.safe_dump(_model_config(spec, name), sort_keys=False),
        f"{_RANK}/{WEIGHTS}": buffer.getvalue(),
        "tokenizer_vocab_dict.json": json.dumps(vocabulary),
        VOCABULARY: "".join(f"{token}\n" for token in vocabulary),
    }
    if task == "text-classification":
        files[_CLASS_LABELS] = "".join(f"{label}\n" for label in spec.part(HeadSpec).labels)
    archive = folder / f"{task}.nemo"
    with tarfile.open(archive, "w:gz") as tar:
        directory = tarfile.TarInfo(_RANK)  # which NeMo counts
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(directory)
        for path, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return f"{archive.name} in {job.dtype}{_notice(spec)}"


@EXPORTERS.register("nemo-autoresume")
def export_to_autoresume(job: Export, folder: Path) -> str:
    """Write a mp_autoresume checkpoint of NeMo's for one rank, as Lightning saves it.

    The optimizer's state is left out: a run that resumes begins with a new one.

    Memory: the full weights.

    Raises:
        WrongCheckpointError: NeMo has no such head.
    """
    _task_of(job.spec)
    _require_expressed(job.spec)
    config = _model_config(job.spec, _pretrained_name(job))
    file = folder / _RANK / LAST
    file.parent.mkdir()
    content = {
        "epoch": 0,
        "global_step": job.manifest.state.iteration,
        "pytorch-lightning_version": "1.9.0",
        "state_dict": _weights(job),
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
        "hparams_name": "cfg",
        "hyper_parameters": {"cfg": config},
        "checkpoint_version": _VERSION_OF_ROWS,
    }
    torch.save(content, file)
    return f"{file.relative_to(folder)} in {job.dtype}{_notice(job.spec)}"


def _task_of(spec: ModelSpec) -> str:
    """Return the task of a head.

    Raises:
        WrongCheckpointError: NeMo has no such head.
    """
    head = spec.part(HeadSpec)
    if not head.head_layers:
        classifier = (
            "; train with --head-layers 2 in place of the pooler, which NeMo's head does not have"
            if head.labels
            else ""
        )
        raise WrongCheckpointError(
            "NeMo's files hold networks of token classification, text classification and question "
            f"answering; this one has another head, or pretraining heads{classifier}"
        )
    if head.first_token_head:
        return "text-classification"
    return "token-classification" if head.labels else "question-answering"


def _require_expressed(spec: ModelSpec) -> None:
    """Refuse a network that is not the Megatron BERT whose sizes NeMo's files have.

    Raises:
        WrongCheckpointError: lists the options that NeMo does not have.
    """
    allowed = {
        **plain_values(spec),
        **dict.fromkeys(("num_token_types", "head_activation")),
        **dict.fromkeys(
            ("num_outputs", "labels", "head_layers", "head_dropout", "first_token_head")
        ),
        "architecture": ("bert",),
        "ffn_hidden_size": (4 * spec.hidden_size,),
        "norm_epsilon": (1e-5,),
        "layernorm_1p": (False,),
    }
    if problems := [
        f"{name} {value} ({flag_setting(name)})" for name, value, _ in not_expressed(spec, allowed)
    ]:
        raise WrongCheckpointError(f"NeMo's files cannot express {', '.join(problems)}")


def _weights(job: Export) -> dict[str, Tensor]:
    """Return the weights by NeMo's names."""
    names = ParameterNames.of(job.manifest.spec)
    dtype = TORCH_DTYPES[job.dtype]
    return {
        _name_in_nemo(names.module(name)): (
            weight[: job.spec.vocabulary.vocab_size] if is_of_vocabulary(name) else weight
        )
        .to(dtype)
        .contiguous()
        for name, weight in job.weights()
    }


def _name_in_nemo(module: str) -> str:
    """Return the name of a parameter in NeMo, given its module's."""
    if match := re.fullmatch(r"classification_head\.(\d+)\.(weight|bias)", module):
        return f"{HEAD}{2 * int(match[1])}.{match[2]}"
    stack = "" if module.startswith("embedding.") else "encoder."
    return f"{ENCODER}{stack}{module}"


def _pretrained_name(job: Export) -> str:
    lower = job.tokenizer_arguments["tokenizer_type"] == "BertWordPieceLowerCase"
    return f"megatron-bert-{'uncased' if lower else 'cased'}"


def _notice(spec: ModelSpec) -> str:
    """Return the differences in NeMo, for the user."""
    if spec.mlp.activation == "gelu_erf":
        return ""
    return "; NeMo computes GELU in its exact form, and this network in the other"


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.attention.num_attention_heads,
        "num_layers": spec.num_layers,
        "max_position_embeddings": spec.positions.max_position_embeddings,
        "num_tokentypes": flat(spec)["num_token_types"],
    }


def _model_config(spec: ModelSpec, name: str) -> dict[str, Any]:
    """Return model_config.yaml."""
    task, head = _task_of(spec), spec.part(HeadSpec)
    layers, dropout = head.head_layers, head.head_dropout
    labels = {label: i for i, label in enumerate(head.labels)}
    heads: dict[str, dict[str, Any]] = {
        "token-classification": {
            "head": {"num_fc_layers": layers, "fc_dropout": dropout, "activation": "relu"},
            "label_ids": labels,
        },
        "text-classification": {
            "classifier_head": {"num_output_layers": layers, "fc_dropout": dropout},
            "dataset": {"num_classes": head.num_outputs, "max_seq_length": spec.seq_length},
            "class_labels": {"class_labels_file": f"nemo:{_CLASS_LABELS}"},
            "label_ids": labels,
        },
        "question-answering": {
            "token_classifier": {"num_layers": layers, "dropout": dropout, "activation": "relu"}
        },
    }
    sizes = {name: size for name, size in _sizes(spec).items() if name != "num_tokentypes"}
    return {
        "tokenizer": {"tokenizer_name": name, "vocab_file": f"nemo:{VOCABULARY}"},
        "language_model": {"pretrained_model_name": name, "config": sizes},
        **heads[task],
        "target": TARGETS[task],
    }
