"""The other tools that make token files give the bytes of tools/preprocess_data.py."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import run_script
from tokenizers import pre_tokenizers

ROOT = Path(__file__).parents[3]
TOKENIZER = "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a directory with a corpus, and its token files under the prefix `one`."""
    folder = tmp_path_factory.mktemp("tools")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "th", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\n")
    lines = [{"text": f"the {i}th line" * (i % 5), "title": "the"} for i in range(500)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(folder, "preprocess_data", "--output-prefix one").returncode == 0
    return folder


def words_of(tool, line):
    flags = f"--input corpus.jsonl --json-keys text title {TOKENIZER} --append-eod {line}"
    return [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *flags.split()]


def run(directory, tool, line):
    return run_script(f"tools/{tool}.py", *words_of(tool, line)[2:], folder=directory)


def pairs(directory, prefix):
    names = [f"_{key}_document{end}" for key in ("text", "title") for end in (".bin", ".idx")]
    return [(directory / (prefix + name)).read_bytes() for name in names]


@pytest.mark.parametrize("line", ["--workers 10", "--workers 4 --partitions 4"])
def test_many_cores_give_the_same_bytes(directory, line):
    done = run(directory, "preprocess_data_many_cores", f"--output-prefix many {line}")
    assert (done.returncode, done.stderr) == (0, "")
    assert pairs(directory, "many") == pairs(directory, "one")
    assert not (directory / "many.stage").exists()


@pytest.mark.parametrize("line", ["--workers 1", "--workers 2"])
def test_when_no_process_reads_the_progress_the_tool_stops_in_good_order(directory, line):
    reading, writing = os.pipe()
    os.close(reading)
    flags = f"--output-prefix unread --log-interval 1 --chunk-size 1 {line}"
    ended = subprocess.run(
        words_of("preprocess_data", flags), cwd=directory, stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, b"")
    assert not [*directory.glob("unread_*")]


def test_shards_of_an_array_give_the_same_bytes(directory):
    for index in (2, 0, 1):
        shard = f"--output-prefix array --num-shards 3 --shard-index {index} --resume"
        assert run(directory, "preprocess_data_dist", shard).returncode == 0
    merge = "--output-prefix array --num-shards 3 --merge-shards --merge serial --resume"
    done = run(directory, "preprocess_data_dist", merge)
    assert (done.returncode, done.stderr) == (0, "")
    assert pairs(directory, "array") == pairs(directory, "one")
    assert not (directory / "array.stage").exists()


TORCHRUN = {"RANK": "{rank}", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "{rank}",
    "SLURM_STEP_NUM_TASKS": "2",
}


@pytest.mark.parametrize("found", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_ranks_of_a_launcher_give_the_same_bytes(directory, found):
    ranks = [
        subprocess.Popen(
            words_of("preprocess_data_dist", "--output-prefix ranks --torch-backend gloo"),
            cwd=directory,
            env=os.environ | {name: text.format(rank=rank) for name, text in found.items()},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    content = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "documents: 400" in content[0]
    assert content[1] == ""
    assert pairs(directory, "ranks") == pairs(directory, "one")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "give --num-shards, 1 or more, or run this under torchrun"),
        ("--num-shards 2", "give --shard-index 0 to 1, or --merge-shards at the end"),
        ("--num-shards 2 --shard-index 2", "--shard-index 2: give 0 to 1"),
        ("--num-shards 2 --shard-index 0 --merge-shards", "give --shard-index 0 to 1, or"),
        ("--shuffle", "--shuffle: documents keep their order"),
    ],
)
def test_a_mistake_about_shards_is_reported(directory, line, message):
    done = run(directory, "preprocess_data_dist", f"--output-prefix wrong {line}")
    assert done.returncode == 2
    assert message in done.stderr


def test_merged_halves_are_the_full_corpus_and_keep_the_record_of_the_tokenizer(directory):
    lines = (directory / "corpus.jsonl").read_text().splitlines(keepends=True)
    for i, half in enumerate((lines[:123], lines[123:])):
        (directory / f"half{i}.jsonl").write_text("".join(half))
        line = f"--output-prefix half{i} --input half{i}.jsonl"
        assert run(directory, "preprocess_data", line).returncode == 0
    tool = str(ROOT / "tools" / "merge_preprocessed_data.py")
    names = ["half0_text_document", "half1_text_document"]
    command = [sys.executable, tool, "--datasets", *names, "--output-prefix", "both"]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    for end in (".bin", ".idx", ".tokenizer.json"):
        full = (directory / f"one_text_document{end}").read_bytes()
        assert (directory / f"both{end}").read_bytes() == full


# A process of its own in between: peak memory counts what a process was forked from.
PEAK = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(usage.ru_maxrss / 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_mb(directory, line, lines):
    with (directory / "large.jsonl").open("wb") as file:
        for _ in range(lines):
            file.write(line)
    flags = "--output-prefix large --max-memory-mb 64 --input large.jsonl"
    command = [sys.executable, "-c", PEAK, *words_of("preprocess_data", flags)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    return done.returncode, float(done.stdout), done.stderr


def test_peak_memory_does_not_grow_with_the_input_or_a_line(directory):
    line = json.dumps({"text": "the line " * 2000, "title": "t"}).encode() + b"\n"
    _, small, _ = peak_mb(directory, line, 200)
    code, large, _ = peak_mb(directory, line, 4000)
    assert code == 0
    assert large < small + 30
    code, peak, content = peak_mb(directory, b"{" * 50_000_000 + b"\n", 1)
    assert code == 2
    assert "line 1: 50000001 bytes long, over the 4194304 that --max-memory-mb leaves" in content
    assert peak < small + 30


def test_a_full_disk_is_reported_and_publishes_nothing(directory):
    done = subprocess.run(
        words_of("preprocess_data", "--output-prefix full"),
        cwd=directory,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write full.stage/000000: File too large")
    assert not list(directory.glob("full*"))
