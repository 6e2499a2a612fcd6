"""Pretrained networks by NeMo's names, their sizes and tokenizers, as flags of this program."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.common.errors import ConfigError, near, raise_if_any
from megatron.config.parsing.files import read_yaml
from megatron.config.parsing.settings import Settings, value

LARGE = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
"""The network of 345M parameters."""

_GENERIC = ("megatron-bert-uncased", "megatron-bert-cased")
PRETRAINED: Mapping[str, bool] = {
    name: "uncased" in name
    for name in (
        *("megatron-bert-345m-uncased", "megatron-bert-345m-cased"),
        *("biomegatron-bert-345m-uncased", "biomegatron-bert-345m-cased"),
        *("biomegatron345m_biovocab_30k_uncased", "biomegatron345m_biovocab_30k_cased"),
        *("biomegatron345m_biovocab_50k_uncased", "biomegatron345m_biovocab_50k_cased"),
        *_GENERIC,
    )
}
"""Names of pretrained networks, and whether their tokenizer makes lower case of text."""

_NETWORK = {
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_layers": "--num-layers",
    "num_hidden_layers": "--num-layers",
    "max_position_embeddings": "--max-position-embeddings",
    "max_seq_length": "--max-position-embeddings",
    "intermediate_size": "--ffn-hidden-size",
    "hidden_dropout_prob": "--hidden-dropout",
    "attention_probs_dropout_prob": "--attention-dropout",
}
"""Flags of the network, by their names in a configuration of the language model."""

CONFIG_GROUP = "model.language_model.config."
"""Prefix of the sizes of a network."""


def language_model_flags(settings: Settings) -> Iterator[str]:
    """Yield the flags of the pretrained network, its sizes and its tokenizer."""
    name = value(settings, "model.language_model.pretrained_model_name")
    checkpoint = value(settings, "model.language_model.lm_checkpoint")
    folder = _folder_of(name)
    config = _language_model_config(settings)
    if name is not None and name not in PRETRAINED and folder is None:
        raise ConfigError(
            f"model.language_model.pretrained_model_name={name}: there is no such folder, and known "
            f"names are {', '.join(PRETRAINED)}{near(Path(str(name)))}"
        )
    if name in _GENERIC and folder is None and (checkpoint is None or not config):
        raise ConfigError(
            f"model.language_model.pretrained_model_name={name} needs "
            "model.language_model.lm_checkpoint and model.language_model.config_file"
        )
    if name in PRETRAINED and folder is None and checkpoint is None:
        raise ConfigError(
            f"model.language_model.pretrained_model_name={name}: nothing is downloaded; put the "
            f"files into a folder {name}, or give model.language_model.lm_checkpoint and "
            "model.tokenizer.vocab_file"
        )
    source = checkpoint or folder
    if source is not None:
        if not Path(str(source)).exists():
            raise ConfigError(
                f"model.language_model.lm_checkpoint={source}: there is no such file or "
                f"directory{near(Path(str(source)))}"
            )
        yield f"--pretrained-checkpoint={source}"
    if name in PRETRAINED and name not in _GENERIC:
        config = {**{_NETWORK[key]: size for key, size in LARGE.items()}, **config}
        config.setdefault("--max-position-embeddings", 512)
    yield from (f"{flag}={size}" for flag, size in config.items())
    yield from _tokenizer_words(settings, name, folder)


def _folder_of(name: Any) -> Path | None:
    """Return the local folder of a pretrained network; None if there is none."""
    return Path(name) if isinstance(name, str) and Path(name).is_dir() else None


def _language_model_config(settings: Settings) -> dict[str, Any]:
    """Return flags of the network with their values: of the file, else of the settings.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown.
    """
    file = settings.get("model.language_model.config_file")
    if file is None:
        found = {
            key.removeprefix(CONFIG_GROUP): setting.value
            for key, setting in settings.items()
            if key.startswith(CONFIG_GROUP)
        }
        where = "model.language_model.config"
    else:
        content, _ = read_yaml(Path(str(file.value)), "model.language_model.config_file")
        where = f"model.language_model.config_file {file.value}"
        if not isinstance(content, dict):
            raise ConfigError(f"{where}: expected names and sizes, found {content!r}")
        found = content
    named = {str(key).replace("-", "_"): size for key, size in found.items()}
    raise_if_any(
        f"{where}: unknown key {key}; known are {', '.join(_NETWORK)}"
        for key in named
        if key not in _NETWORK
    )
    return {_NETWORK[key]: size for key, size in named.items() if size is not None}


def _tokenizer_words(settings: Settings, name: Any, folder: Path | None) -> Iterator[str]:
    """Yield the type of the tokenizer, and its vocabulary in the folder of the network."""
    tokenizer = value(settings, "model.tokenizer.tokenizer_name", name)
    lower = value(settings, "model.dataset.do_lower_case")
    by_name = re.search(r"(?<!un)cased|uncased", str(tokenizer or ""))
    if by_name:  # as NeMo, whose files have do_lower_case for any network
        lower = by_name[0] == "uncased"
    if lower is not None:
        yield f"--tokenizer-type=BertWordPiece{'LowerCase' if lower else 'Case'}"
    if folder is not None and "model.tokenizer.vocab_file" not in settings:
        vocabulary = folder / "vocab.txt"
        if vocabulary.is_file():
            yield f"--vocab-file={vocabulary}"
