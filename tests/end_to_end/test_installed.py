"""The package as pip installs it, from the wheel of an sdist, away from the repository."""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from jobs import REPOSITORY, Corpus, clean_environment, journal
from ports import free_port

from megatron.common.commands import SCRIPTS, VERBS
from megatron.common.version import VERSION

NETWORK = ("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2")
TRAINING = (
    *NETWORK,
    *("--seq-length", "16", "--micro-batch-size", "2", "--lr", "1e-3"),
    *("--train-iters", "2", "--eval-iters", "0", "--log-interval", "1"),
)
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OWN_TOOLS = "docs"
"""The folder of tools that is not installed."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files under version control: building leaves others beside them."""
    source = tmp_path_factory.mktemp("build") / "source"
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others"]
    command += ["--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith("tests/") and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, source / name)
    return source


@pytest.fixture(scope="module")
def site(sources: Path) -> Path:
    """Return a folder into which the wheel of the sdist, which has no more files, is installed."""
    build = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    (archive,) = (sources / "dist").glob("*.tar.gz")
    folder = sources.parent / "site"
    options = ("--no-deps", "--no-build-isolation", "--target", str(folder))
    subprocess.run([*PIP, "install", *options, str(archive)], check=True)
    return folder


def test_the_description_links_to_the_repository(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its address is known, as in a release: elsewhere links stay relative."""
    monkeypatch.setenv("REPOSITORY_URL", "https://example.org/team/project")
    (sources / "meta").mkdir()
    build = "import setuptools.build_meta as it; it.prepare_metadata_for_build_wheel('meta')"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    (metadata,) = (sources / "meta").glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "Project-URL: Repository, https://example.org/team/project" in text
    assert "](https://example.org/team/project/blob/HEAD/docs/install.md)" in text
    assert "](https://example.org/team/project/raw/HEAD/docs/badge_version.svg)" in text
    assert re.findall(r"\]\((?!https?:|#)", text) == []


def run(site: Path, folder: Path, command: str, *words: str, code: int = 0) -> str:
    """Run a console command in `folder` and return what it prints."""
    done = subprocess.run(
        [str(site / "bin" / command), *words],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def files_below(folder: Path) -> set[Path]:
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {path for path in found if "__pycache__" not in path.parts}


def test_an_sdist_installs_every_command_and_every_file(site: Path) -> None:
    assert {file.name for file in (site / "bin").iterdir()} == {"megatron", *SCRIPTS}
    for package, folder in {"megatron_tools": "tools", "megatron_tasks": "tasks"}.items():
        scripts = {path for path in files_below(REPOSITORY / folder) if path.suffix == ".py"}
        scripts = {path for path in scripts if path.parts[0] != OWN_TOOLS}
        assert scripts == files_below(site / package)
    assert files_below(REPOSITORY / "megatron") == files_below(site / "megatron")
    assert (site / "megatron" / "py.typed").exists()
    presets = {path.name for path in (REPOSITORY / "examples" / "models").glob("*.yaml")}
    assert presets == {path.name for path in (site / "megatron_models").glob("*.yaml")}


@pytest.mark.parametrize("command", SCRIPTS)
def test_the_help_of_a_command_names_what_can_be_typed(
    site: Path, tmp_path: Path, command: str
) -> None:
    text = run(site, tmp_path, command, "--help")
    assert f"usage: {command} " in text
    for name in (".py`", "python tools/", "requirements-"):
        assert name not in text, next(line for line in text.splitlines() if name in line)


def test_one_command_runs_every_program(site: Path, tmp_path: Path) -> None:
    shown = run(site, tmp_path, "megatron")
    found = dict(re.findall(r"^  ([\w-]+) +(\w.*)$", shown, re.MULTILINE))
    assert [*found] == [*VERBS]
    assert {"pretrain-bert", "pretrain-t5", "train", "plan", "convert", "train-tokenizer"} <= {
        *found
    }
    assert "usage: megatron inspect " in run(site, tmp_path, "megatron", "inspect", "--help")
    assert f"megatron {VERSION}" in run(site, tmp_path, "megatron", "--version")
    assert "did you mean serve?" in run(site, tmp_path, "megatron", "serv", code=2)


def test_verbs_and_flags_are_completed(site: Path, tmp_path: Path) -> None:
    """By the script that the command prints, as bash calls it."""
    script = """
        eval "$(megatron completion)"
        COMP_WORDS=(megatron "ser") COMP_CWORD=1; _megatron; echo "${COMPREPLY[@]}"
        COMP_WORDS=(megatron serve "--po") COMP_CWORD=2; _megatron; echo "${COMPREPLY[@]}"
        COMP_WORDS=(megatron-plan "--sea") COMP_CWORD=1; _megatron; echo "${COMPREPLY[@]}"
        COMP_WORDS=(megatron merge "fi") COMP_CWORD=2; _megatron; echo "${COMPREPLY[@]}"
        complete -p megatron megatron-to-hf
    """
    environment = {**clean_environment(), "PYTHONPATH": str(site)}
    environment["PATH"] = f"{site / 'bin'}:{environment['PATH']}"
    command = ["bash", "-euc", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[:4] == ["serve", "--port --position-embedding-type", "--search", ""], done
    assert len(lines) == 6


def test_messages_name_what_can_be_typed(site: Path, tmp_path: Path) -> None:
    words = (*TRAINING, "--tensor-model-parallel-size", "2", "--data-path", "none", "--model_name")
    message = run(site, tmp_path, "megatron-train", *words[:-1], code=2)
    assert "`deepspeed --num_gpus 2 --module pretrain_gpt …`" in message
    message = run(site, tmp_path, "megatron-train", "--data", "wikitext", code=2)
    assert "megatron-preprocess makes token files of text" in message


def test_presets_are_found(site: Path, tmp_path: Path) -> None:
    words = ("--preset", "llama-3.1-8b", "--num-gpus", "8", "--micro-batch-size", "1", "--bf16")
    words += ("--lr", "1e-4", "--train-iters", "1", "--vocabulary", "128256")
    assert "8,030,261,248" in run(site, tmp_path, "megatron-plan", *words)
    message = run(site, tmp_path, "megatron-plan", "--preset", "llama3", code=2)
    assert "did you mean llama-3" in message


def test_installed_commands_do_what_they_are_for(
    site: Path, corpus: Corpus, tmp_path: Path
) -> None:
    tokenizer = ("--vocab-file", corpus.vocab_file, "--merge-file", corpus.merge_file)
    run(
        *(site, tmp_path, "megatron-preprocess", "--input", corpus.text_file),
        *("--output-prefix", "small", "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"),
        *("--workers", "2", *tokenizer),
    )
    data = tmp_path / "small_text_document"
    assert data.with_suffix(".bin").read_bytes() == Path(corpus.prefix + ".bin").read_bytes()
    merge = ("--datasets", data.name, data.name, "--output-prefix", "twice")
    run(site, tmp_path, "megatron-merge", *merge)
    assert "documents" in run(site, tmp_path, "megatron-inspect-data", "--prefix", "twice")
    assert "FLOPs per step" in run(
        site, tmp_path, "megatron-plan", *TRAINING, "--vocab-size", "512"
    )
    save = ("--data-path", data.name, "--save", "run", "--save-interval", "2")
    run(site, tmp_path, "megatron-train", *TRAINING, *tokenizer, *save)
    assert [record["iteration"] for record in journal(tmp_path / "run", "train")] == [1, 2]
    assert os.listdir(tmp_path / "run" / "global_step2")
    assert "run" in run(site, tmp_path, "megatron-watch", "run", "--once")
    prompt = ("--prompt", "The", "--out-seq-length", "4", "--micro-batch-size", "1")
    assert "The" in run(site, tmp_path, "megatron-generate", "--load", "run", *prompt)
    (tmp_path / "wiki.txt").write_text("The cat sat on the mat . \n" * 9)
    task = ("--task", "WIKITEXT103", "--valid-data", "wiki.txt", "--load", "run")
    assert "ppl: " in run(site, tmp_path, "megatron-evaluate", *task)
    run(site, tmp_path, "megatron-to-hf", "--load", "run", "--save", "exported")
    assert (tmp_path / "exported" / "config.json").exists()
    run(site, tmp_path, "megatron-from-hf", "--load", "exported", "--save", "imported")
    assert (tmp_path / "imported" / "latest").exists()
    assert serves(site, tmp_path, "--load", "run", "--micro-batch-size", "1")
    run(site, tmp_path, "megatron-doctor", "--nproc", "x", code=2)


def serves(site: Path, folder: Path, *words: str) -> bool:
    """Whether the server of `words` says that it is healthy."""
    port = str(free_port())
    command = [str(site / "bin" / "megatron-serve"), "--port", port, *words]
    environment = {**clean_environment(), "PYTHONPATH": str(site)}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            while server.poll() is None:
                with (
                    suppress(OSError),
                    urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as reply,
                ):
                    return reply.status == 200
                time.sleep(0.5)
        finally:
            server.terminate()
            server.wait(60)
    return False
