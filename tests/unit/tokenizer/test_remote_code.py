"""Python code in the directory of a tokenizer or a model is run only where flags ask for it."""

import pytest
from problems import problem
from remote_code import write_code

from megatron.checkpointing.hugging_face.import_model import ImportOptions, describe_model
from megatron.common.errors import WrongCheckpointError, WrongDataError
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.types.hugging_face import load_with_transformers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return write_code(tmp_path, monkeypatch)


def arguments(folder, *kwargs):
    return {
        "tokenizer_type": "PretrainedFromHF",
        "tokenizer_name_or_path": str(folder),
        "tokenizer_kwargs": kwargs or None,
    }


def test_no_code_is_run_unasked(folder):
    needs = "Python code … --tokenizer-kwargs trust_remote"
    with problem(needs, WrongDataError):
        build_tokenizer(**arguments(folder))
    with problem(needs, WrongDataError):
        load_with_transformers(str(folder), {})
    with problem("Python code … never", WrongCheckpointError):
        describe_model(folder, ImportOptions(), save=folder)
    assert not (folder.parent / "ran").exists()


def test_code_is_run_where_the_flag_asks_for_it(folder):
    tokenizer = build_tokenizer(**arguments(folder, "trust_remote_code", "true"))
    assert (folder.parent / "ran").exists()
    assert tokenizer.encode("aaa") == [0, 0, 0]
