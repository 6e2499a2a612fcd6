"""The package as pip installs it: from a wheel, away from the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import REPOSITORY, Corpus, clean_environment, journal

from megatron.common.commands import SCRIPTS

TRAINING = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--micro-batch-size", "2", "--lr", "1e-3"),
    *("--train-iters", "2", "--eval-iters", "0", "--log-interval", "1"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which the wheel is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # building leaves files beside the source
    listed = subprocess.run(
        [
            "git",
            "-C",
            str(REPOSITORY),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith("tests/") and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *wheel], check=True)
    (built,) = folder.glob("*.whl")
    target = folder / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(built)], check=True)
    return target


def run(site: Path, folder: Path, command: str, *words: str) -> str:
    """Run a console command in `folder` and return what it prints."""
    environment = {**clean_environment(), "PYTHONPATH": str(site)}
    done = subprocess.run(
        [str(site / "bin" / command), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_wheel_has_every_command_and_every_file(site: Path) -> None:
    assert {file.name for file in (site / "bin").iterdir()} == set(SCRIPTS)
    for package, folder in {"megatron_tools": "tools", "megatron_tasks": "tasks"}.items():
        scripts = {p.relative_to(REPOSITORY / folder) for p in (REPOSITORY / folder).rglob("*.py")}
        assert scripts == {p.relative_to(site / package) for p in (site / package).rglob("*.py")}
    here = {p.relative_to(REPOSITORY) for p in (REPOSITORY / "megatron").rglob("*") if p.is_file()}
    there = {p.relative_to(site) for p in (site / "megatron").rglob("*") if p.is_file()}
    assert {p for p in here ^ there if "__pycache__" not in p.parts} == set()


def test_installed_commands_prepare_data_plan_and_train(
    site: Path, corpus: Corpus, tmp_path: Path
) -> None:
    tokenizer = ("--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file)
    run(
        *(site, tmp_path, "megatron-preprocess", "--input", corpus.text_file),
        *("--output-prefix", "small", "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"),
        *("--workers", "2", *tokenizer),
    )
    assert (tmp_path / "small_text_document.bin").read_bytes() == Path(
        corpus.prefix + ".bin"
    ).read_bytes()
    output = run(site, tmp_path, "megatron-plan", *TRAINING, "--vocab-size", "512")
    assert "FLOPs per step" in output
    run(
        *(site, tmp_path, "megatron-train", *TRAINING, *tokenizer),
        *("--data-path", "small_text_document", "--save", "run", "--save-interval", "2"),
    )
    assert [record["iteration"] for record in journal(tmp_path / "run", "train")] == [1, 2]
    assert os.listdir(tmp_path / "run" / "global_step2")
