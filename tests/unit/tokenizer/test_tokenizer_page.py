"""The commands of the page on tokenizers run, and so does the benchmark."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(*command, cwd):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_commands_of_the_page_run(tmp_path):
    page = (ROOT / "docs" / "tokenizers.md").read_text(encoding="utf-8")
    # The other block uses the files of data.md, as those of most pages do.
    *_, block = (part.partition("```")[0] for part in page.split("```bash\n")[1:])
    done = run("bash", "-e", "-c", block, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the last text: Document 999 tells that 999 times 999 is 998001." in done.stdout
    assert "['vocabulary of 500 tokens, and 501 now', '500 tokens differ: id 0" in done.stdout
    assert (tmp_path / "corpus.tokenizer.json").exists()


def test_the_benchmark_compares_and_checks_its_flags(tmp_path):
    program = sys.executable, str(ROOT / "benchmarks" / "tokenizer_speed.py")
    done = run(*program, "--megabytes", "0.02", "--rounds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["short", "mixed", "long"]
    assert all("| ratio: " in line for line in lines)
    for flags, message in (
        (("--megabytes", "0"), "--megabytes must be more than 0"),
        (("--vocab-file", "v"), "give both --vocab-file and --merge-file"),
    ):
        done = run(*program, *flags, cwd=tmp_path)
        assert (done.returncode, message in done.stderr) == (2, True)
