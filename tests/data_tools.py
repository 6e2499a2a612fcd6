"""Tools that show data, as they are run."""

from scripts import run_script
from sentence_corpora import thousand_documents, write_sentences, write_vocabulary
from source import REPOSITORY

TOOLS = REPOSITORY / "tools"


def run(tool, line, *words):
    return run_script(f"tools/{tool}", *line.split(), *words)


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
