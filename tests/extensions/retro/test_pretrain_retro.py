"""pretrain_retro.py trains, and goes on as if it had never stopped, also in another layout."""

import shutil
from pathlib import Path

import pytest
from jobs import REPOSITORY, journal, losses, start_ranks
from retro_project import random_documents, write_project

RETRO = [
    *("--num-layers", "8", "--hidden-size", "32", "--num-attention-heads", "4", "--lr", "3e-3"),
    *("--micro-batch-size", "1", "--vocab-size", "60", "--log-interval", "1", "--device", "cpu"),
    *("--save-interval", "2", "--attention-dropout", "0", "--hidden-dropout", "0"),
]


def test_retro(tmp_path: Path) -> None:
    """A run goes on in another layout; a GPT on the same samples can be gone on with as a Retro."""
    project = write_project(tmp_path / "project", random_documents(60))
    flags = [*RETRO, "--retro-project-dir", str(project)]
    script = str(REPOSITORY / "pretrain_retro.py")
    save, other = tmp_path / "retro", tmp_path / "other"
    words = [*flags, "--retro-add-retriever", "--retro-encoder-hidden-dropout", "0"]
    words += ["--retro-encoder-attention-dropout", "0"]
    stages = ["--pipeline-model-parallel-size", "2", "--save", str(save)]
    start_ranks(2, *words, *stages, "--checkpoint-activations", script=script).succeeded()
    shutil.copytree(save / "global_step2", other / "global_step2")
    tensor = ["--tensor-model-parallel-size", "2", "--load", str(other), "--save", str(other)]
    saved = [*RETRO[6:], "--use-checkpoint-args"]
    start_ranks(2, *saved, *tensor, script=script).succeeded()
    assert losses(other) == pytest.approx(losses(save)[2:], rel=1e-4)
    evaluations = [record["lm_loss"] for record in journal(save, "evaluation")]
    found = [record["lm_loss"] for record in journal(other, "evaluation")]
    assert found == pytest.approx(evaluations[1:], rel=1e-4)

    gpt, fitted = tmp_path / "gpt", tmp_path / "fitted"
    start_ranks(1, *flags, "--save", str(gpt), "--exit-interval", "2", script=script).succeeded()
    load = ["--load", str(gpt), "--finetune", "--no-load-optim", "--save", str(fitted)]
    gate = ["--retro-attention-gate", "0", "--lr", "1e-9", "--exit-interval", "2"]
    start_ranks(2, *words, *load, *gate, *stages[:2], script=script).succeeded()
    last, first = (journal(run, "evaluation")[0]["lm_loss"] for run in (gpt, fitted))
    assert first == pytest.approx(last, rel=1e-5)
