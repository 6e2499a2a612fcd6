"""Python code in the directory of a scorer is never run."""

import pytest
from remote_code import write_code

from megatron.common.errors import ConfigError
from megatron.extensions.detox.toxicity.scorers import transformers_classifier


@pytest.mark.parametrize("has_own_tokenizer", [True, False])
def test_code_of_a_model_is_never_run(tmp_path, monkeypatch, has_own_tokenizer):
    folder = write_code(tmp_path, monkeypatch, tokenizer=has_own_tokenizer)
    never = "needs Python code of its own .* which is never run"
    with pytest.raises(ConfigError, match=f"--scorer-model {folder}: the folder {never}"):
        transformers_classifier(str(folder), None)
    assert not (tmp_path / "ran").exists()
