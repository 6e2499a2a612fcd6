"""tools/merge_preprocessed_data.py, as it is run."""

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from problems import require_problem
from scripts import run_script

from megatron.common.errors import DataError
from megatron.data.token_files.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron.data.token_files.merge import merge
from megatron.data.token_files.publish import staged_record
from megatron.tokenizer.fingerprint import describe, read_record, record_path, to_text
from megatron.tokenizer.types.null import NullTokenizer

TOOL = Path(__file__).parents[3] / "tools" / "merge_preprocessed_data.py"


@pytest.fixture
def directory(tmp_path):
    """Return a directory with three pairs."""
    for i in range(3):
        with IndexedDatasetWriter(tmp_path / f"p{i}_text_document", "u2") as writer:
            writer.append([i, i])
            writer.append([i] * 5000)
    return tmp_path


def run(directory, line):
    return run_script("tools/merge_preprocessed_data.py", *line.split(), folder=directory)


LINE = "--datasets p1_text_document p0_text_document p2_text_document --output-prefix all"


@pytest.mark.parametrize(
    "how", ["", "--merge distributed --workers 2", "--merge serial --torch-backend gloo"]
)
def test_the_command_of_old_scripts_merges_in_the_order_given(directory, how):
    done = run(directory, f"{LINE} {how}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(
        "all.bin, .idx: documents: 6 | sequences: 6 | tokens: 15006 | "
        f"bytes of both files: {30012 + 34 + 12 * 6 + 8 * 7}\n"
    )
    dataset = IndexedDataset(directory / "all")
    assert [int(dataset[i][0]) for i in range(6)] == [1, 1, 0, 0, 2, 2]


def test_an_older_pair_is_replaced_not_in_silence_and_without_its_record(directory):
    with IndexedDatasetWriter(directory / "all", "u2") as writer:
        writer.append([7])
    record_path(directory / "all").write_text(to_text(describe(NullTokenizer(10))))
    done = run(directory, LINE)
    assert "replaces all.bin and all.idx when the new files are complete\n" in done.stdout
    assert len(IndexedDataset(directory / "all")) == 6
    assert not record_path(directory / "all").exists()


@pytest.mark.parametrize("index", [b"x", None])
def test_a_failed_merge_leaves_an_older_pair_with_its_record(directory, index, monkeypatch):
    """It fails on what it reads, or when it is about to give the new files their names."""
    with IndexedDatasetWriter(directory / "all", "u2") as writer:
        writer.append([7])
    record_path(directory / "all").write_text(to_text(describe(NullTokenizer(10))))
    before = {path.name: path.read_bytes() for path in directory.glob("all*")}
    if index:
        (directory / "p1_text_document.idx").write_bytes(index)
    else:
        monkeypatch.setattr("megatron.data.token_files.merge.publish_pair", full_disk)
    inputs = [str(directory / f"p{i}_text_document") for i in range(3)]
    with pytest.raises(DataError), staged_record([str(directory / "all")], ""):
        merge(inputs, str(directory / "all"))
    assert {path.name: path.read_bytes() for path in directory.glob("all*")} == before


def full_disk(*arguments):
    raise DataError("cannot write all.bin: No space left on device")


def test_the_record_of_the_tokenizer_is_carried_on(directory):
    record = describe(NullTokenizer(10), {"tokenizer_type": "NullTokenizer", "vocab_size": 10})
    for i in range(3):
        record_path(directory / f"p{i}_text_document").write_text(to_text(record))
    assert run(directory, LINE).returncode == 0
    assert read_record(directory / "all") == record
    assert not [*directory.glob("*.new")]


def test_the_chat_template_is_carried_on(directory):
    record = describe(NullTokenizer(10))
    for i, template in enumerate((None, "{{ a }}", "{{ a }}")):  # None: of an older version
        record_path(directory / f"p{i}_text_document").write_text(
            to_text(replace(record, chat_template=template))
        )
    assert run(directory, LINE).returncode == 0
    assert read_record(directory / "all").chat_template == "{{ a }}"


def test_texts_and_conversations_do_not_mix(directory):
    for i, template in enumerate(("{{ a }}", "", "{{ a }}")):
        record = replace(describe(NullTokenizer(10)), chat_template=template)
        record_path(directory / f"p{i}_text_document").write_text(to_text(record))
    done = run(directory, LINE)
    assert done.returncode == 2
    words = (
        "p2_text_document holds conversations … p1_text_document holds texts … merge files of one"
    )
    require_problem(words, [done.stderr])
    assert not [*directory.glob("all*")]


def test_conversations_of_different_templates_do_not_mix(directory):
    record = describe(NullTokenizer(10))
    for i in range(3):
        own = replace(record, chat_template=f"{{{{ {i // 2} }}}}")
        record_path(directory / f"p{i}_text_document").write_text(to_text(own))
    done = run(directory, LINE)
    assert done.returncode == 2
    require_problem("p2_text_document … p1_text_document … same --chat-template", [done.stderr])
    assert not [*directory.glob("all*")]


def test_tokens_of_different_tokenizers_do_not_mix(directory):
    for i in range(3):
        record_path(directory / f"p{i}_text_document").write_text(
            to_text(describe(NullTokenizer(10 + i // 2)))
        )
    done = run(directory, LINE)
    assert done.returncode == 2
    words = "p2_text_document … another tokenizer … p1_text_document: … 11 tokens … 12"
    require_problem(words, [done.stderr])
    assert not [*directory.glob("all*")]


MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize("position", [{"RANK": "1", "WORLD_SIZE": "2"}, MPIRUN])
def test_ranks_but_the_first_leave_the_work_to_it(directory, position, monkeypatch):
    for name, value in position.items():
        monkeypatch.setenv(name, value)
    done = run(directory, LINE)
    assert (done.returncode, done.stdout) == (0, "")
    assert not (directory / "all.bin").exists()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("--datasets none --output-prefix all", 2, "no token files at none"),
        (f"{LINE} --workers 2", 2, "only --merge distributed has workers"),
        (f"{LINE} --merge distributed --workers 0", 2, "--workers 0: give 1 or more"),
        (f"{LINE}/none/all", 2, "--output-prefix all/none/all: there is no folder all/none"),
    ],
)
def test_a_mistake_is_reported_and_leaves_nothing(directory, line, code, message):
    before = sorted(directory.iterdir())
    done = run(directory, line)
    assert done.returncode == code
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert sorted(directory.iterdir()) == before


def test_no_replacement_is_announced_before_it_is_known(directory):
    (directory / "all.bin").write_bytes(b"")
    for line in (LINE.replace("p2", "none"), LINE.replace("all", "p0_text_document")):
        done = run(directory, line)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("how", ["", "--merge distributed --workers 2"])
def test_a_full_disk_leaves_nothing(directory, how):
    before = sorted(directory.iterdir())
    done = subprocess.run(
        [sys.executable, str(TOOL), *LINE.split(), *how.split()],
        cwd=directory,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write all.bin")
    assert done.stderr.count("\n") == 1
    assert sorted(directory.iterdir()) == before


def test_it_starts_without_torch(directory):
    program = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(TOOL)], cwd=directory)
    assert done.returncode == 0
