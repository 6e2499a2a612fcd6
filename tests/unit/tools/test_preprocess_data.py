"""tools/preprocess_data.py, as it is run: from any directory, to an exit code."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from problems import require_problem
from scripts import run_script
from tokenizers import pre_tokenizers

from megatron.data.token_files.indexed_dataset import IndexedDataset
from megatron.tokenizer.types.adversarial import adversarial_texts
from megatron.tokenizer.types.gpt2 import GPT2BPETokenizer

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"
INPUTS = {"corpus.jsonl", "corpus.txt", "merges.txt", "vocab.json"}


@pytest.fixture
def directory(tmp_path):
    """Return a directory with a vocabulary of bytes and one merge, and two corpora."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "th", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    lines = [{"src": "web", "content": f"the {i}th line", "id": i} for i in range(60)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "corpus.txt").write_text("the plain text\n")
    return tmp_path


def command(line):
    words = line.replace("TOKENIZER", "--tokenizer-type GPT2BPETokenizer --vocab vocab.json")
    return [sys.executable, str(TOOL), *words.split()]


def run(directory, line):
    return run_script("tools/preprocess_data.py", *command(line)[2:], folder=directory)


def new_files(directory):
    return {path.name for path in directory.iterdir()} - INPUTS


def test_the_command_of_old_scripts_runs_as_written(directory):
    done = run(
        directory,
        "--input corpus.jsonl --output-prefix codeparrot --vocab vocab.json --dataset-impl mmap "
        "--tokenizer-type GPT2BPETokenizer --merge-file merges.txt --json-keys content "
        "--workers 2 --chunk-size 25 --append-eod",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert new_files(directory) == {
        "codeparrot_content_document.bin",
        "codeparrot_content_document.bin.xxh3",
        "codeparrot_content_document.idx",
        "codeparrot_content_document.tokenizer.json",
        "codeparrot.report.json",
    }
    tokenizer = GPT2BPETokenizer(directory / "vocab.json", directory / "merges.txt")
    dataset = IndexedDataset(directory / "codeparrot_content_document")
    assert [tokenizer.decode(dataset[i].tolist()) for i in range(len(dataset))] == [
        f"the {i}th line<|endoftext|>" for i in range(60)
    ]
    assert done.stdout.startswith(
        f"codeparrot_content_document.bin, .idx: documents: 60 | tokens: {len(dataset.tokens)} | "
        f"bytes of both files: {2 * len(dataset.tokens) + 34 + 12 * 60 + 8 * 61} | "
        "documents without a token, left out: 0\n"
    )


def test_several_inputs_and_keys_are_taken(directory):
    done = run(
        directory,
        "--input corpus.jsonl corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
        "--json-key src content",
    )
    assert done.returncode == 0
    assert len(IndexedDataset(directory / "out_src_document")) == 120
    assert len(IndexedDataset(directory / "out_content_document")) == 120


@pytest.mark.parametrize(
    ("line", "code", "errors"),
    [
        (
            "--input corpus.txt --input-format json --output-prefix out TOKENIZER --dataset-impl mmap",
            2,
            ["--vocab-file and --merge-file; --merge-file missing", "corpus.txt, line 1: not JSON"],
        ),
        (
            "--input corpus.txt --input-format json --output-prefix out TOKENIZER --merge-file merges.txt",
            2,
            ["corpus.txt, line 1: not JSON: 'the plain text'"],
        ),
        (
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt",
            2,
            ["corpus.jsonl, line 1: no key 'text'; it has 'src', 'content', 'id'"],
        ),
        (
            "--input none.jsonl --output-prefix out TOKENIZER --merge-file merges.txt",
            2,
            ["cannot read --input none.jsonl: No such file or directory"],
        ),
        (
            "--input corpus.jsonl --output-prefix out --json-keys content",
            2,
            ["--tokenizer-type is missing"],
        ),
        (
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --workers 0 --chunk-size -1 --log-interval 0",
            2,
            ["--workers 0: give 1", "--chunk-size -1: give 1", "--log-interval 0: give 1"],
        ),
        ("--input corpus.jsonl --output-prefix out TOKENIZER --worker 2", 2, ["--workers?"]),
        ("TOKENIZER", 2, ["the following arguments are required: --input"]),
        (
            "--input corpus.jsonl TOKENIZER --merge-file merges.txt --json-keys content",
            2,
            ["--output-prefix is missing: give the path of the output"],
        ),
        ("--input corpus.jsonl --output-prefix out --dataset-impl eager", 2, ["'eager'"]),
        (
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --on-error collect --keep-newlines",
            2,
            ["collect has one FILE", "--keep-newlines: only"],
        ),
        (
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --lang french",
            2,
            ["--lang french: only --split-sentences uses a language"],
        ),
        (
            "--input *.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --on-error collect ./corpus.jsonl",
            2,
            ["--on-error collect ./corpus.jsonl would replace an --input"],
        ),
        (
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --on-error collect merges.txt",
            2,
            ["--on-error collect merges.txt would replace a file that is no list of bad lines"],
        ),
        (
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --on-error collect none/bad.jsonl",
            2,
            ["--on-error collect none/bad.jsonl: there is no directory none"],
        ),
        (
            "--input *.jsonl.gz --output-prefix out TOKENIZER --merge-file merges.txt",
            2,
            ["no file matches --input *.jsonl.gz"],
        ),
        (
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--datasets wikipedia",
            2,
            ["--datasets: give the files to --input"],
        ),
    ],
)
def test_a_mistake_is_reported_without_traceback_and_leaves_nothing(directory, line, code, errors):
    done = run(directory, line)
    assert done.returncode == code
    assert all(report.startswith("error: ") for report in done.stderr.splitlines())
    assert len(done.stderr.splitlines()) == len(errors)
    for error in errors:
        assert error in done.stderr
    assert new_files(directory) == set()


def test_a_failing_late_line_leaves_nothing(directory):
    with (directory / "corpus.jsonl").open("a") as file:
        file.write("no json\n")
    done = run(
        directory,
        "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
        "--json-keys content --workers 2 --chunk-size 5",
    )
    assert done.returncode == 2
    require_problem("error: corpus.jsonl, line 61: … JSON … 'no json'", [done.stderr])
    assert new_files(directory) == set()


def test_adversarial_texts_come_through_and_half_pairs_are_named(directory):
    eod = "<|endoftext|>"
    texts = [text for text in adversarial_texts([eod]) if text] + ["\r\n a\rb\n\r\n\x00"]
    halves = ['{"text": "half \\ud83d of a pair"}', '{"text": "\\ude00"}']
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 > 0) for i, text in enumerate(texts)]
    (directory / "texts.jsonl").write_bytes("\r\n".join([*halves, *lines]).encode())
    done = run(
        directory,
        "--input texts.jsonl --output-prefix out TOKENIZER --merge-file merges.txt --append-eod "
        "--workers 2 --chunk-size 100 --on-error collect bad.jsonl",
    )
    assert done.returncode == 0
    bad = [json.loads(line) for line in (directory / "bad.jsonl").read_text().splitlines()]
    assert [each["line"] for each in bad] == [1, 2]
    assert all("half of a surrogate pair" in each["problem"] for each in bad)
    tokenizer = GPT2BPETokenizer(directory / "vocab.json", directory / "merges.txt")
    dataset = IndexedDataset(directory / "out_text_document")
    decoded = [tokenizer.decode(dataset[i].tolist()) for i in range(len(dataset))]
    assert decoded == [text + eod for text in texts]
    of_eod = dataset.tokens[:] == tokenizer.special_ids["eod"]
    assert int(of_eod.sum()) == len(texts)


def test_the_fastest_number_of_workers_is_found_and_nothing_written(directory):
    before = new_files(directory)
    line = (
        "--input corpus.jsonl TOKENIZER --merge-file merges.txt "
        "--json-keys content --find-optimal-num-workers --workers-to-check 1 3 --max-documents 40"
    )
    done = run(directory, line)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    one, three = (f"--workers {count}: 40 documents in " for count in (1, 3))
    assert (lines[0].startswith(one), lines[1].startswith(three)) == (True, True)
    assert lines[2] in ("fastest: --workers 1", "fastest: --workers 3")
    assert new_files(directory) == before
    done = run(directory, line.replace("--workers-to-check 1 3", "--workers-to-check 0"))
    assert new_files(directory) == before
    assert done.returncode == 2
    require_problem("--workers-to-check and --max-documents: … 1", [done.stderr])


def start_in_the_middle(directory):
    """Start a run whose input is a pipe, and return it with the open pipe once it is read."""
    os.mkfifo(directory / "endless.jsonl")
    process = subprocess.Popen(
        command(
            "--input endless.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --workers 2 --chunk-size 1 --log-interval 1"
        ),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pipe = (directory / "endless.jsonl").open("w")
    pipe.write('{"content": "a"}\n' * 9)
    pipe.flush()
    wait_until(lambda: [*(directory / "out.stage").glob("*.text")])
    assert new_files(directory) == {"endless.jsonl", "out.stage"}
    return process, pipe


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_leaves_nothing(directory, number, code):
    process, pipe = start_in_the_middle(directory)
    with pipe:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, "")
    assert new_files(directory) == {"endless.jsonl"}


def test_workers_end_when_the_run_is_killed(directory):
    process, pipe = start_in_the_middle(directory)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until(lambda: len(children.read_text().split()) == 3)
    workers = [Path("/proc", pid) for pid in children.read_text().split()]
    with pipe:
        process.kill()
        process.communicate(timeout=60)

    def is_gone(worker):
        try:
            return (worker / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    wait_until(lambda: all(is_gone(worker) for worker in workers))


def test_a_terminal_gets_a_bar(directory):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 120, 0, 0))
    subprocess.run(
        command(
            "--input corpus.jsonl --output-prefix out TOKENIZER --merge-file merges.txt "
            "--json-keys content --log-interval 1"
        ),
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "100%" in shown
    assert "60 documents" in shown


def test_it_starts_without_torch_and_transformers(directory):
    program = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(TOOL)], cwd=directory, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_commands_of_the_page_on_data_run(tmp_path):
    page = (ROOT / "docs" / "data.md").read_text()
    block = page.partition("```bash\n")[2].partition("```")[0]
    for name in ("megatron", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", block],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "documents: 1000" in done.stdout
