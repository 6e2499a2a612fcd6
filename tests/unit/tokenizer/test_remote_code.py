"""Python code in the directory of a tokenizer or a model is run only where flags ask for it."""

import json
import sys

import pytest
from transformers import BertTokenizerFast

from megatron.checkpointing.hugging_face.import_model import ImportOptions, describe_model
from megatron.common.errors import ConfigError, WrongCheckpointError, WrongDataError
from megatron.extensions.detox.toxicity.scorers import transformers_classifier
from megatron.extensions.retro.inference_embedders import Batches, TransformersEmbedder
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.hugging_face import load_with_transformers
from megatron.training.process.environment import Launch

CODE = """\
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizer

Path({mark!r}).touch()

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{}}

    @property
    def vocab_size(self):
        return 1

    def get_vocab(self):
        return {{"a": 0}}

    def _tokenize(self, text, **kwargs):
        return ["a"] * len(text)

    def _convert_token_to_id(self, token):
        return 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory with code, whose user answers "y" to every question."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "mod"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    classes = {"AutoTokenizer": ["own.OwnTokenizer", None], "AutoConfig": "own.OwnConfig"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": classes})
    )
    return folder


def arguments(folder, *kwargs):
    return {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": str(folder),
        "tokenizer_kwargs": kwargs or None,
    }


def test_no_code_is_run_unasked(folder):
    needs = "needs Python code of its own, which is run only with --tokenizer-kwargs trust_remote"
    with pytest.raises(WrongDataError, match=needs):
        build_tokenizer(**arguments(folder))
    with pytest.raises(WrongDataError, match=needs):
        load_with_transformers(str(folder), {})
    with pytest.raises(WrongCheckpointError, match="with its own Python code, which is never run"):
        describe_model(folder, ImportOptions(), save=folder)
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize("has_own_tokenizer", [True, False])
def test_embedders_and_scorers_never_run_code(folder, has_own_tokenizer):
    if not has_own_tokenizer:
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    never = "needs Python code of its own .* which is never run"
    with pytest.raises(ConfigError, match=f"--bert-load {folder}: the folder {never}"):
        TransformersEmbedder(folder, Batches(1, 8), Launch(0, 1, 0, 1))
    with pytest.raises(ConfigError, match=f"--scorer-model {folder}: the folder {never}"):
        transformers_classifier(str(folder), None)
    assert not (folder.parent / "ran").exists()


def test_code_is_run_where_the_flag_asks_for_it(folder):
    tokenizer = build_tokenizer(**arguments(folder, "trust_remote_code", "true"))
    assert (folder.parent / "ran").exists()
    assert tokenizer.encode("aaa") == [0, 0, 0]
