"""The tools that look at data: build_index, sample_idxs_to_text, samples_of_step, inspect_data."""

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import islice

import numpy as np
import pytest
from data_tools import TOOLS, output, run
from problems import require_problem
from tiny import tiny_config, tiny_plan
from tokenizers import pre_tokenizers

from megatron.checkpointing.manifest import Manifest, write_manifest
from megatron.checkpointing.train_state import TrainState
from megatron.data.datasets.datasets import build_datasets
from megatron.data.sampling.batch_sampler import micro_batches
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.tokenizer.build import build_tokenizer
from megatron.tokenizer.fingerprint import describe, record_path, to_text
from megatron.tokenizer.types.null import NullTokenizer

TEXTS = [f"text {i}" for i in range(200)]
RAMP = "--train-samples 60 --global-batch-size 8 --rampup-batch-size 4 4 12"
RUN = f"--seq-length 6 --micro-batch-size 2 --data-path corpus --split 8,1,1 --eval-iters 1 {RAMP}"


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Return the working directory, with a vocabulary of bytes and a corpus of its tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with IndexedDatasetWriter(tmp_path / "corpus", "u2") as writer:
        for text in TEXTS:
            writer.append([*(vocab[letter] for letter in text.replace(" ", "Ġ")), len(letters)])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def datasets(*flags, world_size=1):
    """Return plan and data sets of the run, from its own command line."""
    plan = tiny_plan(
        *RUN.split(), *flags, world_size=world_size, without=("--train-iters", "--data-path")
    )
    return plan, build_datasets(plan.data, seq_length=6, seed=plan.training.seed)


TOKENIZER = "--vocab-file vocab.json --merge-file merges.txt"


def test_training_only_reads_what_was_built_ahead(directory):
    lines = output("build_index.py", f"{RUN} --data-cache-path cache")
    assert [line.partition(":")[0] for line in lines[:6]] == [
        "training set train",
        "  corpus",
        "validation set valid",
        "  corpus",
        "test set test",
        "  corpus",
    ]
    tokens = sum(len(text) + 1 for text in TEXTS[:160])
    assert lines[1] == (
        f"  corpus: weight: 1.0000 | documents: 160 | tokens: {tokens} | samples wanted: 60 | "
        f"epochs: {60 * 6 / tokens:.2f}"
    )
    built = {file.name: file.stat().st_ino for file in (directory / "cache").iterdir()}
    assert len(built) == 3 * (2 * 3 + 1)  # maps with digests, and sizes
    datasets("--data-cache-path", "cache")
    found = {file.name: file.stat().st_ino for file in (directory / "cache").iterdir()}
    assert found == built


def test_a_full_command_line_of_training_is_accepted(directory):
    line = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --lr 0.1 --fp16 --zero-stage 1 "
        "--deepspeed --DDP-impl local --num-workers 2 --tensor-model-parallel-size 2 "
        f"--pipeline-model-parallel-size 2 --distributed-backend nccl {TOKENIZER} "
        "--save run --save-interval 5 --load run --dataloader-type cyclic"
    )
    messages = output("build_index.py", f"{RUN} {line} --world-size 8")
    notices = [text for text in messages if text.startswith("WARNING [rank 0]: --")]
    assert "--deepspeed: every run goes through DeepSpeed" in notices[0]
    assert messages[len(notices)].startswith("training set train: samples wanted: 60 | samples: ")


def test_the_number_of_processes_matters_without_a_global_batch_size(directory):
    line = "--seq-length 6 --micro-batch-size 2 --data-path corpus --split 8,1,1 --train-iters 5"
    assert "samples wanted: 10 " in output("build_index.py", line)[0]
    assert "samples wanted: 30 " in output("build_index.py", f"{line} --world-size 3")[0]
    done = run("build_index.py", f"{line} --world-size 3 --tensor-model-parallel-size 2")
    assert done.returncode == 2
    require_problem("--world-size 3 … multiple of tensor * pipeline", [done.stderr])


def test_mistakes_are_reported_together(directory):
    done = run("build_index.py", "--seq-length 6 --micro-batch-size 2 --data-path a b")
    assert done.returncode == 2
    require_problem("one of --train-iters", [done.stderr])
    require_problem("--data-path a b: … prefixes", [done.stderr])


def test_samples_are_shown_as_training_reads_them(directory):
    _, sets = datasets()
    lines = output("sample_idxs_to_text.py", f"{RUN} {TOKENIZER} --sample-id-range 3 9")
    vocab = json.loads((directory / "vocab.json").read_text())
    letters = {token: letter.replace("Ġ", " ") for letter, token in vocab.items()}
    rows = [sets.train[i]["tokens"].tolist() for i in range(3, 9)]
    assert lines == [
        f"{i} {''.join(letters[t] for t in row)}" for i, row in enumerate(rows, start=3)
    ]
    tokens = output("sample_idxs_to_text.py", f"{RUN} --sample-id-range 3 9 --print-tokens")
    assert tokens == [f"{i} {' '.join(map(str, row))}" for i, row in enumerate(rows, start=3)]


def test_long_samples_are_shown_in_part_without_the_flag(directory):
    line = f"{RUN} --seq-length 20 --sample-id-range 0 1 --print-tokens"
    (short,) = output("sample_idxs_to_text.py", line)
    (full,) = output("sample_idxs_to_text.py", f"{line} --all-tokens --output-file out") or [
        (directory / "out").read_text().strip()
    ]
    assert len(full.split()) == 22
    assert short.split() == [*full.split()[:9], "...", *full.split()[-8:]]


def test_another_tokenizer_than_made_the_tokens_shows_no_text_of_them(directory):
    record_path("corpus").write_text(to_text(describe(NullTokenizer(300))))
    line = f"{RUN} {TOKENIZER} --sample-id-range 3 9"
    done = run("sample_idxs_to_text.py", line)
    assert (done.returncode, done.stdout) == (2, "")
    require_problem("corpus.bin … another tokenizer … NullTokenizer", [done.stderr])
    assert len(output("sample_idxs_to_text.py", f"{line} --print-tokens")) == 6


@pytest.mark.parametrize(
    "line",
    ["sample_idxs_to_text.py --sample-id-range 0 1 --print-tokens", "samples_of_step.py --steps 1"],
)
def test_the_run_may_be_named_in_a_file_of_flags(directory, line):
    (directory / "flags.yaml").write_text("load: other-run\n")
    manifest = directory / "other-run" / "global_step1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{")
    tool, _, flags = line.partition(" ")
    done = run(tool, f"--config flags.yaml {flags}")
    assert done.returncode != 0
    require_problem("other-run/global_step1/manifest.json … damaged", [done.stderr])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--sample-id-range 3", "--sample-id-range 3: give two numbers"),
        ("--sample-id-range 3 3", "--sample-id-range 3 3: 0 <= first < second is needed"),
        ("--sample-id-range 0 100000 --print-tokens", "--sample-id-range 0 100000: the run has"),
        ("--sample-id-range 0 1 --all-tokens", "--all-tokens needs --print-tokens"),
    ],
)
def test_samples_that_are_not_there_are_refused(directory, line, message):
    done = run("sample_idxs_to_text.py", f"{RUN} {line}")
    assert done.returncode == 2
    assert message in done.stderr


def read_by_training(world_size, *flags):
    """Return {(step, replica, micro-batch): tokens}, from the samplers of a run in a ramp-up."""
    plan, sets = datasets(*flags, world_size=world_size)
    batch, found = plan.batch, {}
    for replica in range(world_size):
        rows = micro_batches(
            sets.train,
            consumed_samples=0,
            micro_batch_size=batch.micro_batch_size,
            data_rank=replica,
            data_size=world_size,
        )
        samples = 0
        for step in range(1, plan.training.train_iters + 1):
            size = batch.size_at(samples)
            for i, read in enumerate(islice(rows, batch.num_micro_batches(size))):
                found[step, replica, i] = [row.tolist() for row in read["tokens"]]
            samples += size
    return plan, found


def told_by_tool(lines):
    """Return the same from the tool's lines, with tokens read from the documents it names."""
    corpus, found = IndexedDataset("corpus"), {}
    for line in lines:
        if line.startswith("step "):
            step = int(line.split()[1].rstrip(":"))
            continue
        _, reader, where = line.split(" | ", 2)
        _, replica, _, micro_batch = reader.split()
        tokens = []
        for piece in where.partition("documents ")[2].split():
            document, _, span = piece.rstrip("]").partition("[")
            start, stop = map(int, span.split(":"))
            tokens.append(corpus[int(document)][start:stop])
        key = (step, int(replica), int(micro_batch))
        found.setdefault(key, []).append(np.concatenate(tokens).tolist())
    return found


@pytest.mark.parametrize("order", ["single", "cyclic"])
def test_a_step_has_seen_what_the_tool_shows(directory, order):
    flags = ["--dataloader-type", order]
    plan, expected = read_by_training(2, *flags)
    last = plan.training.train_iters
    lines = output("samples_of_step.py", f"{RUN} --world-size 2 --steps 1 {last}", *flags)
    assert told_by_tool(lines) == expected
    (one,) = [line for line in output("samples_of_step.py", f"{RUN} --steps 4") if "step" in line]
    assert one == "step 4: samples 12 to 19"


def test_a_checkpoint_supplies_the_flags(directory):
    words = ["--data-path", "corpus", "--split", "8,1,1", "--eval-iters", "1", *RAMP.split()]
    config = tiny_config(*words, without=("--train-iters",))
    plan = tiny_plan(*words, world_size=2, without=("--train-iters",))
    folder = directory / "run" / "global_step5"
    folder.mkdir(parents=True)
    manifest = Manifest(
        state=TrainState(),
        plan=plan.to_dict(),
        config=asdict(config),
        versions={},
        partition_dims={},
        files=(),
    )
    write_manifest(folder, manifest)
    lines = output("samples_of_step.py", "--load run --steps 2 4")
    assert lines == output("samples_of_step.py", f"{RUN} --world-size 2 --steps 2 4")
    assert "replica 1" in "".join(lines)
    tokens = "--sample-id-range 3 9 --print-tokens"
    lines = output("sample_idxs_to_text.py", f"--load run {tokens}")
    assert lines == output("sample_idxs_to_text.py", f"{RUN} --world-size 2 {tokens}")
    other = output("sample_idxs_to_text.py", f"--load run --seed 7 {tokens}")
    assert other == output("sample_idxs_to_text.py", f"{RUN} --world-size 2 --seed 7 {tokens}")
    assert other != lines


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("0", "--steps 0: the run has steps 1 to 9"),
        ("3 10", "--steps 3 10: the run has steps 1 to 9"),
        ("3 2", "--steps 3 2: give the first step, then the last"),
        ("1 2 3", "--steps 1 2 3: give one number, or the first and the last"),
    ],
)
def test_steps_that_the_run_does_not_have_are_refused(directory, steps, message):
    done = run("samples_of_step.py", f"{RUN} --steps {steps}")
    assert done.returncode == 2
    assert message in done.stderr


def test_token_files_are_described(directory):
    lines = output("inspect_data.py", "corpus --documents 2")
    tokens = sum(len(text) + 1 for text in TEXTS)
    assert f"documents: 200 | sequences: 200 | tokens: {tokens}" in lines
    assert "format: mmap | data type: uint16" in lines
    lengths = "7 (1%), 7 (5%), 8 (25%), 8 (50%), 9 (75%), 9 (95%), 9 (99%)"
    assert f"tokens per document: mean 8.4, 7 to 9: {lengths}" in lines
    assert "empty documents: 0" in lines
    first = " ".join(map(str, IndexedDataset("corpus")[0]))
    assert lines[-2] == f"document 0: 7 tokens: {first}"


def test_documents_are_shown_as_text_with_a_tokenizer(directory):
    lines = output("inspect_data.py", f"--prefix corpus {TOKENIZER} --max-tokens 6")
    assert lines[-1] == "document 2: 7 tokens: 'text 2' ... 1 more"


def about_tokenizer(line):
    (about,) = [line for line in output("inspect_data.py", line) if line.startswith("tokenizer: ")]
    return about.removeprefix("tokenizer: ")


def test_documents_are_shown_as_text_with_the_recorded_tokenizer(directory, tmp_path_factory):
    options = {"tokenizer_type": "GPT2BPETokenizer"}
    options |= {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    record_path("corpus").write_text(to_text(describe(build_tokenizer(**options), options)))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(
        [sys.executable, TOOLS / "inspect_data.py", directory / "corpus"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "document 2: 7 tokens: 'text 2<|endoftext|>'"
    assert about_tokenizer("corpus") == "vocab.json, as recorded"
    assert about_tokenizer(f"corpus {TOKENIZER}") == "vocab.json, which made these tokens"
    about = about_tokenizer("corpus --tokenizer-type NullTokenizer --vocab-size 300")
    assert about.startswith("NullTokenizer is ANOTHER than made these tokens (vocab.json): ")
    too_small = output("inspect_data.py", "corpus --tokenizer-type NullTokenizer --vocab-size 9")
    assert too_small[-1].endswith(" 256")
    (directory / "merges.txt").unlink()
    about = about_tokenizer("corpus")
    assert "vocab.json, cannot be built again (cannot read --merge-file" in about
    assert f"text needs --tokenizer-type GPT2BPETokenizer --vocab-file {directory}" in about
    assert output("inspect_data.py", "corpus")[-1].endswith(" 256")


def test_a_tokenizer_with_other_ids_than_recorded_does_not_decode(directory):
    options = {"tokenizer_type": "NullTokenizer", "vocab_size": 300}
    other = {"tokenizer_type": "NullTokenizer", "vocab_size": 400}
    record_path("corpus").write_text(to_text(describe(build_tokenizer(**options), other)))
    about = about_tokenizer("corpus")
    assert "cannot be built again (vocabulary of 301 tokens, and 401 now" in about


def test_what_nothing_is_recorded_of_is_reported(directory):
    needs = "text needs --tokenizer-type and its files"
    assert about_tokenizer("corpus") == f"corpus.tokenizer.json is missing; {needs}"
    about = about_tokenizer(f"corpus {TOKENIZER}")
    assert about == "vocab.json; corpus.tokenizer.json, to compare it with, is missing"
    record_path("corpus").write_text(to_text(describe(NullTokenizer(300))))
    assert about_tokenizer("corpus") == f"NullTokenizer; {needs}"


def test_an_empty_pair_is_described(directory):
    with IndexedDatasetWriter("empty", "i4"):
        pass
    assert "documents: 0 | sequences: 0 | tokens: 0" in output("inspect_data.py", "empty")


def test_digests_are_compared_and_made_anew(directory):
    sound = "digests: 1 blocks, all as they were written"
    assert sound in output("inspect_data.py", "corpus")
    digests = (directory / "corpus.bin.xxh3").read_bytes()
    with open("corpus.bin", "r+b") as file:
        file.write(b"\1")
    done = run("inspect_data.py", "corpus")
    assert done.returncode == 2
    require_problem("corpus.bin … bytes 0 to … --write-digests", [done.stderr])
    assert sound in output("inspect_data.py", "corpus --write-digests")
    assert (directory / "corpus.bin.xxh3").read_bytes() != digests
    (directory / "corpus.bin.xxh3").unlink()
    (line,) = [each for each in output("inspect_data.py", "corpus") if "digests" in each]
    assert line.startswith("digests: none, ")


def test_damaged_files_are_reported(directory):
    with open("corpus.bin", "ab") as file:
        file.write(b"x")
    done = run("inspect_data.py", "corpus")
    assert done.returncode == 2
    require_problem("corpus.bin … index … bytes", [done.stderr])


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("build_index.py", RUN),
        ("samples_of_step.py", f"{RUN} --steps 1"),
        ("sample_idxs_to_text.py", f"{RUN} {TOKENIZER} --sample-id-range 0 1"),
        ("inspect_data.py", f"corpus {TOKENIZER}"),
    ],
)
def test_no_torch_is_needed(directory, tool, line):
    code = (
        f"import sys, runpy; sys.argv = {[tool, *line.split()]!r}\n"
        f"try: runpy.run_path({str(TOOLS / tool)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "print({'torch', 'deepspeed', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
