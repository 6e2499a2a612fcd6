"""The first thing a newcomer runs, small."""

import shutil
from pathlib import Path

import pytest
from jobs import REPOSITORY, Finished, journal, start
from ports import free_port
from quick_python import write_launchers

QUICKSTART = str(REPOSITORY / "examples" / "quickstart.sh")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A folder like a virtual environment in which all is installed, whose Python starts forks."""
    write_launchers(tmp_path / "venv" / "bin", port=str(free_port()))
    shutil.copy(REPOSITORY / "requirements.txt", tmp_path / "venv" / ".installed-requirements.txt")
    return tmp_path / "venv"


def quickstart(out: Path, venv: Path, *, iterations: int = 20, **environment: str) -> Finished:
    return start(
        "bash",
        QUICKSTART,
        **{
            "OUT": str(out),
            "QUICKSTART_ITERS": str(iterations),
            "QUICKSTART_MB": "2",
            "VENV": str(venv),
            **environment,
        },
    )


def test_it_trains_resumes_and_generates_and_then_uses_what_is_there(
    venv: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = quickstart(out, venv).succeeded().outputs[0]

    assert first.count("$ deepspeed --num_gpus") == 2
    assert "exiting program at iteration 10" in first
    assert "successfully loaded checkpoint" in first
    assert "training is done after 20 iterations" in first
    assert (out / "checkpoints/latest").read_text() == "global_step20"
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("events.*"))
    assert "def hello_world():" in (out / "sample.txt").read_text()
    assert "holds" in first and "as GPT2LMHeadModel in fp32" in first
    assert "the same as those of the trained network" in first

    steps = journal(out / "checkpoints", "train")
    assert [step["iteration"] for step in steps] == [10, 20]
    assert steps[1]["lm_loss"] < steps[0]["lm_loss"]
    (held_out,) = [r for r in journal(out / "checkpoints", "evaluation") if r["set"] == "valid"]
    for line in (
        f"tokens:                {steps[1]['consumed_tokens']:,}",
        f"loss, first -> last:   {steps[0]['lm_loss']:.3f} -> {steps[1]['lm_loss']:.3f}",
        f"validation perplexity: {held_out['ppl']:.1f}",
        f"checkpoints:           {out}/checkpoints",
        f"loss curve:            {out}/loss.png",
    ):
        assert line in first
    assert first.rstrip().endswith((out / "sample.txt").read_text().rstrip())

    second = quickstart(out, venv).succeeded().outputs[0]
    for made_before in ("make_corpus.py", "train_tokenizer.py", "preprocess_data.py", "deepspeed"):
        assert f"$ python examples/quickstart/{made_before}" not in second
        assert f"$ python tools/{made_before}" not in second
        assert f"$ {made_before}" not in second
    assert len(journal(out / "checkpoints", "train")) == 2
    assert "validation perplexity" in second

    other = quickstart(out, venv, iterations=40)
    assert other.codes == [2]
    assert "was made with QUICKSTART_ITERS=20" in other.outputs[0]


def test_a_python_that_is_too_old_is_said(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho Python 3.8.1\nexit 1\n")
    old.chmod(0o755)
    done = quickstart(tmp_path / "out", tmp_path / "env", PYTHON=str(old))
    assert done.codes == [1]
    assert "Python 3.10 or newer is needed, and " in done.outputs[0]
    assert 'says "Python 3.8.1"' in done.outputs[0]
    assert not (tmp_path / "env").exists()
