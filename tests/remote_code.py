"""A directory of a tokenizer or a model with Python code of its own."""

import json
from pathlib import Path

import pytest
from transformers import BertTokenizerFast

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


def write_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, tokenizer: bool = True) -> Path:
    """Return a directory with code, whose user answers "y" to every question.

    Args:
        tokenizer: whether the directory has a tokenizer of its own; else it has a WordPiece one.
    """
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "mod"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    classes = {"AutoTokenizer": ["own.OwnTokenizer", None], "AutoConfig": "own.OwnConfig"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": classes}))
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": classes}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    if not tokenizer:
        (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
        BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder
