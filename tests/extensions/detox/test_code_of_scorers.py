"""Python code in the directory of a scorer is never run."""

import pytest
from problems import problem
from remote_code import write_code

from megatron.extensions.detox.toxicity.scorers import transformers_classifier


@pytest.mark.parametrize("has_own_tokenizer", [True, False])
def test_code_of_a_model_is_never_run(tmp_path, monkeypatch, has_own_tokenizer):
    folder = write_code(tmp_path, monkeypatch, tokenizer=has_own_tokenizer)
    with problem(f"--scorer-model {folder} … Python code … never run"):
        transformers_classifier(str(folder), None)
    assert not (tmp_path / "ran").exists()
