"""Tools that show data, as they are run."""

import subprocess
import sys

from sentence_corpora import thousand_documents, write_sentences, write_vocabulary
from source import REPOSITORY

TOOLS = REPOSITORY / "tools"


def run(tool, line, *words):
    return subprocess.run(
        [sys.executable, TOOLS / tool, *line.split(), *words], capture_output=True, text=True
    )


def output(tool, line, *words):
    done = run(tool, line, *words)
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if not line.startswith("built the ")]


def write_run_of_sentences():
    """Write documents of sentences to the working directory; return the flags of a run on them."""
    write_sentences("sentences", *thousand_documents())
    write_vocabulary("vocab.txt")
    return (
        "--data-path sentences --vocab-file vocab.txt --seq-length 32 --train-iters 5 "
        "--micro-batch-size 2"
    )
