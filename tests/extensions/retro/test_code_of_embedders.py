"""Python code in the directory of an embedder is never run."""

import pytest
from problems import problem
from remote_code import write_code

from megatron.extensions.retro.inference_embedders import Batches, TransformersEmbedder
from megatron.training.process.environment import Launch


@pytest.mark.parametrize("has_own_tokenizer", [True, False])
def test_code_of_a_model_is_never_run(tmp_path, monkeypatch, has_own_tokenizer):
    folder = write_code(tmp_path, monkeypatch, tokenizer=has_own_tokenizer)
    with problem(f"--bert-load {folder} … Python code … never run"):
        TransformersEmbedder(folder, Batches(1, 8), Launch(0, 1, 0, 1))
    assert not (tmp_path / "ran").exists()
