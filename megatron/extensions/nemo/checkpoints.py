"""Read NeMo's BERTs with the head of a text task: .nemo archives and mp_autoresume checkpoints."""

import json
import re
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from megatron.checkpointing.megatron_lm.foreign_checkpoint import ForeignCheckpoint
from megatron.checkpointing.megatron_lm.megatron import found_in
from megatron.checkpointing.resharding.unpickle import Opaque, read_foreign
from megatron.common.errors import MegatronError, WrongCheckpointError
from megatron.common.registry import LOADERS
from megatron.config.parsing.files import parse_yaml
from megatron.extensions.tasks.flags import objective_of

ENCODER, HEAD = "bert_model.language_model.", "classifier.mlp.layer"
"""Prefixes of parameters; layers of a head have even numbers, and activations odd ones."""

WEIGHTS, VERSION, CONFIG = (
    "model_weights.ckpt",
    "megatron_checkpoint_version.json",
    "model_config.yaml",
)
ENCODER_CONFIG, VOCABULARY = "encoder_config.json", "tokenizer.vocab_file"
LAST = "mp_autoresume-last.ckpt"
"""Names of files, or ends of them: in an archive names may have a prefix."""

_DAMAGES = (OSError, EOFError, tarfile.TarError, zlib.error)
"""Errors of an archive that is damaged, or is none."""

_MOST_BYTES = 1 << 26
"""Size of a configuration or vocabulary."""

TARGETS = {
    "token-classification": (
        "nemo.collections.nlp.models.token_classification.token_classification_model."
        "TokenClassificationModel"
    ),
    "text-classification": (
        "nemo.collections.nlp.models.text_classification.text_classification_model."
        "TextClassificationModel"
    ),
    "question-answering": "nemo.collections.nlp.models.question_answering.qa_model.QAModel",
}
"""Classes of NeMo by the task of their head."""


@LOADERS.register("nemo")
def find(path: Path, *, heads: int | None = None, task: str | None = None) -> ForeignCheckpoint:
    """Read an archive, a mp_autoresume checkpoint, or a folder of mp_rank_XX with such; merge ranks.

    Args:
        heads: attention heads, for files that do not name them.
        task: of the head, for files that do not name it.

    Raises:
        CheckpointError: it is damaged, or its head is none of a network here.
    """
    if path.suffix != ".nemo":
        with _errors_name(path):
            return _read_network(path, _rank_files(path), {}, heads=heads, task=task)
    with TemporaryDirectory() as folder, _errors_name(path):
        with tarfile.open(path) as archive:
            _require_room(archive, path, folder)
            archive.extractall(folder, filter="data")
        content = Path(folder)
        return _read_network(path, _rank_files(content), _settings(content), heads=heads, task=task)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Turn any error from a file of other content into one sentence."""
    try:
        yield
    except MegatronError:
        raise
    except _DAMAGES as error:
        raise WrongCheckpointError(f"{path} is no archive of NeMo's: {error}") from error
    except Exception as error:
        # Each field may be missing or of another type, and each tensor of another shape.
        raise WrongCheckpointError(
            f"{path} is not understood as a checkpoint of NeMo's: {error!r:.300}"
        ) from error


def _require_room(archive: tarfile.TarFile, path: Path, folder: str) -> None:
    """Refuse to unpack an archive that does not fit: a small one can have members of terabytes."""
    needed = sum(member.size for member in archive.getmembers())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise WrongCheckpointError(
            f"{path} needs {needed:,} bytes in {Path(folder).parent} while it is read, and {free:,} "
            "are free: make room, or name another folder in TMPDIR"
        )


def tokenizer_in(archive: Path) -> tuple[str, bytes] | None:
    """Return the type of the tokenizer of an archive, and its vocabulary; None of other checkpoints.

    Raises:
        WrongCheckpointError: it is no archive, or has no vocabulary.
    """
    if archive.suffix != ".nemo":
        return None
    config, vocabulary = b"", b""
    with _errors_name(archive), tarfile.open(archive) as tar:
        for member in tar:
            if not member.isfile() or not member.name.endswith((CONFIG, VOCABULARY)):
                continue
            _require_small(member.name, member.size)
            file = tar.extractfile(member)
            content = file.read() if file else b""
            if member.name.endswith(CONFIG):
                config = content
            else:
                vocabulary = content
        settings = parse_yaml(config.decode("utf-8")) or {}
        name = str((settings.get("tokenizer") or {}).get("tokenizer_name"))
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
        files = [folder / WEIGHTS, *sorted(folder.glob("mp_autoresume*-last.ckpt"))]
        files += sorted(folder.glob("mp_autoresume*.ckpt"))
        found += [file for file in files if file.is_file()][:1]
    if not found or len(found) < len(folders):
        raise WrongCheckpointError(f"{path} lacks {WEIGHTS} or {LAST} of a rank")
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """Return the content of the small files of an archive.

    Raises:
        WrongCheckpointError: one cannot be read.
    """
    found: dict[str, Any] = {}
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in files:
        try:
            if file.name.endswith(CONFIG):
                found["model"] = dict(parse_yaml(_text(file)) or {})
            elif file.name.endswith((ENCODER_CONFIG, VERSION)):
                found |= json.loads(_text(file))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise WrongCheckpointError(
                f"{file.name} of the archive is not understood: {error}"
            ) from error
    name = str((found.get("model", {}).get("class_labels") or {}).get("class_labels_file"))
    for file in files:
        if file.name == name.removeprefix("nemo:"):
            found["class_labels"] = _text(file).split("\n")
    return found


def _text(file: Path) -> str:
    _require_small(file.name, file.stat().st_size)
    return file.read_text(encoding="utf-8")


def _require_small(name: str, num_bytes: int) -> None:
    if num_bytes > _MOST_BYTES:
        raise WrongCheckpointError(
            f"{name} of the archive has {num_bytes:,} bytes, over {_MOST_BYTES:,}"
        )


def _read_network(
    path: Path,
    files: Sequence[Path],
    settings: Mapping[str, Any],
    *,
    heads: int | None,
    task: str | None,
) -> ForeignCheckpoint:
    """Return the network in the files of all ranks."""
    loaded = [read_foreign(file) for file in files]
    ranks = [
        {
            "model": _rename(rank.get("state_dict", rank), path),
            "checkpoint_version": settings.get(
                "checkpoint_version", rank.get("checkpoint_version", 0)
            ),
        }
        for rank in loaded
    ]
    # Lightning's checkpoints have the configuration of the model too.
    model = settings.get("model") or _plain(loaded[0].get("hyper_parameters", {})).get("cfg", {})
    config = (model.get("language_model") or {}).get("config") or {}
    sizes = {str(name).replace("-", "_"): value for name, value in {**config, **settings}.items()}
    found = found_in(path, [ranks], heads=sizes.get("num_attention_heads") or heads)
    last = [rank for name, rank in ranks[0]["model"].items() if name.startswith("classification_")]
    layers, outputs = len(last) // 2, len(last[-1])
    named = next((task for task, target in TARGETS.items() if model.get("target") == target), task)
    task = named or (
        "question-answering" if (layers, outputs) == (1, 2) else "token-classification"
    )
    # NeMo computes GELU in its exact form.
    values = {"task": task, "train_data": ["none"], "head_layers": layers, "gelu": "erf"}
    if task == "question-answering":  # which has to leave room for a context
        positions = len(ranks[0]["model"]["language_model.embedding.position_embeddings.weight"])
        values["max_query_length"] = min(64, positions // 2)
    else:
        values["labels"] = _labels(model, settings, outputs)
    return replace(found, values={**found.values, **values}, objective=objective_of(task))


def _labels(model: Mapping[str, Any], settings: Mapping[str, Any], outputs: int) -> list[str]:
    """Return the names of the outputs of a head; numbers if there are none."""
    ids = model.get("label_ids") or {}
    names = sorted(ids, key=lambda name: ids[name])
    for found in (
        names,
        [name.strip() for name in settings.get("class_labels", []) if name.strip()],
    ):
        if len(found) == outputs:
            return [*map(str, found)]
    return [*map(str, range(outputs))]


def _plain(node: Any) -> Any:
    """Return the content of a configuration of omegaconf's, whose classes are not imported."""
    saved = vars(node) if isinstance(node, Opaque) else {}
    content = saved.get("_content", saved.get("_val", node))
    if isinstance(content, Mapping):
        return {str(_plain(key)): _plain(value) for key, value in content.items()}
    if isinstance(content, list):
        return [*map(_plain, content)]
    return content


def _rename(state: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights of a rank by Megatron-LM's names, and the head's weights by ours.

    Raises:
        WrongCheckpointError: it is no BERT with the head of a text task.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(ENCODER):
            found[name.removeprefix("bert_model.")] = tensor
        elif match := re.fullmatch(rf"{re.escape(HEAD)}(\d+)\.(weight|bias)", name):
            found[f"classification_head.{int(match[1]) // 2}.{match[2]}"] = tensor
    if not any(name.startswith("classification_head.") for name in found) or len(found) < 8:
        raise WrongCheckpointError(
            f"{path} holds no BERT of Megatron's with the head of token classification, text "
            "classification or question answering"
        )
    if "pooler" in "".join(found):
        found = {name: tensor for name, tensor in found.items() if ".pooler." not in name}
    return found
