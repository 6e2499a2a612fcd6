"""pretrain_bert.py trains, and goes on as if it had never stopped, also in another layout."""

from pathlib import Path

import pytest
from jobs import journal
from objective_runs import require_resharded, sentence_flags, trained_and_resumed

BERT = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16", "--zero-stage", "1"]


def test_bert(tmp_path: Path) -> None:
    flags = [*sentence_flags(tmp_path), "--tensorboard-dir", str(tmp_path / "curves")]
    save = trained_and_resumed("pretrain_bert.py", 2, [*flags, *BERT], tmp_path)
    steps = journal(save, "step")
    assert all(step["loss"] == pytest.approx(step["lm_loss"] + step["sop_loss"]) for step in steps)
    assert all("sop_loss" in record for record in journal(save, "evaluation"))
    # Two stages, on other kernels.
    flags += ["--pipeline-model-parallel-size", "2", "--bf16"]
    flags += ["--attention-impl", "reference", "--checkpoint-activations"]
    require_resharded("pretrain_bert.py", flags, save, tmp_path)
