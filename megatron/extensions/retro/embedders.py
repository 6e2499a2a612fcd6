"""Choice of the embedder of a Retro project, and of the counter of its tokens.

Needs torch for a BERT alone.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from megatron.checkpointing.manifest import MANIFEST, hash_of, names_in
from megatron.common.atomic_files import replace_text
from megatron.common.errors import ConfigError, DataError, near
from megatron.data.token_files.publish import write_errors_name
from megatron.extensions.retro.retrieval.embedders import (
    Embedder,
    HashedEmbedder,
    PieceCounter,
    TokenCounter,
    WordCounter,
)
from megatron.extensions.retro.retrieval.flags import RetroPreprocessingConfig
from megatron.extensions.retro.retrieval.project import Project
from megatron.inference.loading.model_source import (
    ModelSource,
    read_model_source,
    tokenizer_arguments_of,
)
from megatron.training.process.environment import Launch

_ENCODER = "encoder.json"  # in the project: files of the encoder and their hashes


def counter_of(project: Project) -> Callable[[], TokenCounter]:
    """Return a picklable function that makes the counter of the embedder's tokens.

    Raises:
        ConfigError: there is no encoder in --bert-load.
        CheckpointError: its checkpoint is damaged.
    """
    config: RetroPreprocessingConfig = project.config
    if config.bert_embedder_type == "hashed":
        return WordCounter
    folder = _require_folder(config)
    if config.bert_embedder_type == "megatron":
        arguments = tokenizer_arguments_of(_checkpoint(project, folder), "bert")
    else:
        arguments = {
            "tokenizer_type": "PretrainedFromHF",
            "tokenizer_name_or_path": str(folder),
            "tokenizer_hf_no_include_special_tokens": True,
        }
    return partial(PieceCounter, arguments)


def embedder_of(project: Project, launch: Launch) -> Callable[[], Embedder]:
    """Return a function that loads the embedder at its first call.

    Args:
        launch: of this process, which chooses its GPU.
    """
    config: RetroPreprocessingConfig = project.config

    def load() -> Embedder:
        if config.bert_embedder_type == "hashed":
            return HashedEmbedder(config.retro_hashed_width)
        folder = _require_folder(config)
        # Torch takes seconds to import, and the other embedder runs without it.
        from megatron.extensions.retro import inference_embedders as bert_embedders

        batches = bert_embedders.Batches(
            config.retro_bert_batch_size, config.retro_bert_max_chunk_length
        )
        if config.bert_embedder_type == "megatron":
            source = _checkpoint(project, folder)
            _require_same_encoder(project, source.folder)
            return bert_embedders.load_bert_embedder(source, batches, launch)
        _require_same_encoder(project, folder)
        return bert_embedders.TransformersEmbedder(folder, batches, launch)

    return cache(load)


def _checkpoint(project: Project, folder: Path) -> ModelSource:
    config: RetroPreprocessingConfig = project.config
    words = ["--load", str(folder)]
    if config.retro_bert_tokenizer_type is not None:
        words += ["--tokenizer-type", config.retro_bert_tokenizer_type]
    if project.bert_vocab_file is not None:
        words += ["--vocab-file", project.bert_vocab_file]
    return read_model_source(words, {}, description=None)


def _require_same_encoder(project: Project, folder: Path) -> None:
    """Record the encoder that embeds the chunks of a project; refuse another one at the same path.

    Of a checkpoint of this program the manifest is compared, which has the hashes of its files.

    Raises:
        DataError: it is not the one of earlier commands, or the record cannot be written.
    """
    names = [MANIFEST] if (folder / MANIFEST).is_file() else sorted(names_in(folder))
    files = {}
    for name in names:
        with (folder / name).open("rb") as file:
            files[name] = hash_of(file)
    record = project.directory / _ENCODER
    if not record.exists():
        with write_errors_name(record):
            replace_text(record, json.dumps(files, indent=2) + "\n")
    elif json.loads(record.read_text(encoding="utf-8")) != files:
        raise DataError(
            f"--bert-load {folder} is not the encoder that the project was begun with ({record}): "
            "embeddings of several encoders cannot be compared; begin another --retro-project-dir"
        )


def _require_folder(config: RetroPreprocessingConfig) -> Path:
    folder = Path(config.bert_load or "")
    if not folder.is_dir():
        raise ConfigError(f"--bert-load {folder}: there is no such directory{near(folder)}")
    return folder
