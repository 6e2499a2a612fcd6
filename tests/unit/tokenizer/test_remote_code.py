"""Python code in the directory of a tokenizer or a model is run only where flags ask for it."""

import pytest
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
    needs = "needs Python code of its own, which is run only with --tokenizer-kwargs trust_remote"
    with pytest.raises(WrongDataError, match=needs):
        build_tokenizer(**arguments(folder))
    with pytest.raises(WrongDataError, match=needs):
        load_with_transformers(str(folder), {})
    with pytest.raises(WrongCheckpointError, match="with its own Python code, which is never run"):
        describe_model(folder, ImportOptions(), save=folder)
    assert not (folder.parent / "ran").exists()


def test_code_is_run_where_the_flag_asks_for_it(folder):
    tokenizer = build_tokenizer(**arguments(folder, "trust_remote_code", "true"))
    assert (folder.parent / "ran").exists()
    assert tokenizer.encode("aaa") == [0, 0, 0]
