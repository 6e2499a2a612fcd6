"""The tools that look at data, for samples of other objectives."""

import json
from pathlib import Path

import pytest
from scripts import run_script
from tokenizers import pre_tokenizers

from megatron.data.token_files.indexed_dataset import IndexedDatasetWriter

TOOLS = Path(__file__).parents[3] / "tools"
SPECIAL = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
RUN = "--seq-length 12 --micro-batch-size 2 --train-iters 4 --split 1 --eval-iters 0"
TOKENIZER = "--vocab-file vocab.json --merge-file merges.txt"


@pytest.fixture
def vocab(tmp_path, monkeypatch):
    """Return the vocabulary of bytes beside which the tools run."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    vocab = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    monkeypatch.chdir(tmp_path)
    return vocab


def write(prefix, ids):
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for text in ids:
            writer.append(text)


def lines_of(tool, line):
    done = run_script(f"tools/{tool}", *line.split())
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("built the ")]


@pytest.mark.parametrize("shown", ["", "--print-tokens --all-tokens"], ids=["text", "tokens"])
def test_rearranged_samples_are_shown_as_the_run_reads_them(vocab, shown):
    write("corpus", [[vocab[c] for c in "abcdefghi"] + [vocab[SPECIAL[0]]]] * 20)
    options = f"{RUN} {TOKENIZER} --data-path corpus --sample-id-range 0 8 --fim-rate 1 {shown}"
    lines = lines_of("sample_idxs_to_text.py", options)
    mark = f" {vocab['<fim_prefix>']} " if shown else "<fim_prefix>"
    assert len(lines) == 8
    assert all(mark in line for line in lines)


def test_pairs_are_read_when_the_objective_is_given(vocab):
    for part, letter in (("inputs", "a"), ("targets", "b")):
        write(f"tasks_{part}_document", [[vocab[letter]] * (k % 3 + 1) for k in range(20)])
    options = f"{RUN} --data-path tasks --objective multitask"
    assert (
        "training set train: samples wanted: 8 | samples: "
        in lines_of("build_index.py", options)[0]
    )
    shown = "--print-tokens --all-tokens --sample-id-range 0 4"
    for line in lines_of("sample_idxs_to_text.py", f"{options} {shown}"):
        ids = [int(word) for word in line.split()[1:]]
        assert len(ids) == 13
        assert set(ids) <= {vocab["a"], vocab["b"], 0}
    samples = lines_of("samples_of_step.py", f"{options} --steps 1")
    assert "| tasks_inputs_document sample 1 | documents " in samples[2]
