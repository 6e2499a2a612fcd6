"""Runs that are killed, or whose disk is full, and are taken up again: the same bytes."""

import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from bytes_tokenizer import BytesTokenizer

from megatron.common.errors import DataError
from megatron.data.preprocessing.preprocess import convert_share, merge_shards, preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.progress import Progress
from megatron.data.preprocessing.shard_writer import ShardWriter
from megatron.data.preprocessing.shards import plan_shards, shards_of_rank
from megatron.data.readers.inputs import find_sources
from megatron.data.token_files.indexed_dataset import IndexedDataset

ROOT = Path(__file__).parents[4]
SLOW = """
import sys, time
sys.path[:0] = [{root!r}, {here!r}]
from bytes_tokenizer import BytesTokenizer
from megatron.data.preprocessing import preprocess_spec as conversion
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.data.preprocessing.preprocess import convert_share, merge_shards, preprocess
from megatron.common.errors import MegatronError

class Slow(BytesTokenizer):
    def encode(self, text):
        time.sleep({pause})
        return super().encode(text)

if __name__ == "__main__":
    conversion._BLOCK_BYTES = conversion._SMALLEST_BLOCK_BYTES = 200
    try:
        preprocess(PreprocessSpec(inputs=("a.jsonl",), output_prefix="out", make_encoder=Slow,
            resume=True, shard_bytes=1500, append_eod=True, json_keys=("a", "b"), {more}))
    except MegatronError as error:
        sys.exit(str(error))
"""


@pytest.fixture
def directory(tmp_path):
    """Return a directory with a corpus of two keys."""
    lines = [{"a": "x" * (i * 7 % 31), "b": "y" * (i * 5 % 17)} for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def program(pause=0.0, more=""):
    here = str(ROOT / "tests")
    return SLOW.format(root=str(ROOT), here=here, pause=pause, more=more)


def outputs(directory):
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name.startswith("out_")}


def uninterrupted(directory):
    wishes = {"make_encoder": BytesTokenizer, "append_eod": True, "json_keys": ("a", "b")}
    prefix = directory / "whole" / "out"
    prefix.parent.mkdir()
    preprocess(
        PreprocessSpec(inputs=(str(directory / "a.jsonl"),), output_prefix=str(prefix), **wishes)
    )
    return outputs(directory / "whole")


@pytest.mark.parametrize("more", ["", "workers=2,"])
def test_a_run_killed_again_and_again_gives_the_same_bytes(directory, more):
    expected = uninterrupted(directory)
    (directory / "run.py").write_text(program(pause=0.001, more=more))
    command = [sys.executable, str(directory / "run.py")]
    chance = random.Random(more)
    kills = 0
    for _ in range(6):
        process = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.2, 0.7))
        process.kill()
        kills += process.wait() != 0
        assert outputs(directory).items() <= expected.items()
    (directory / "run.py").write_text(program(more=more))
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    assert kills
    assert outputs(directory) == expected
    assert not (directory / "out.stage").exists()


def test_a_shard_that_is_not_finished_does_not_count(directory, monkeypatch):
    expected = uninterrupted(directory)

    def killed(writer):
        writer.close()
        raise KeyboardInterrupt

    wishes = conversion(directory, append_eod=True, json_keys=("a", "b"))
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", killed)
        patch.setattr("megatron.data.preprocessing.preprocess.remove_folders", lambda folders: None)
        with pytest.raises(KeyboardInterrupt):
            preprocess(wishes)
    assert (directory / "out.stage" / "000000" / "0.bin").stat().st_size
    preprocess(replace(wishes, resume=True))
    assert outputs(directory) == expected


def test_a_full_disk_publishes_nothing_and_can_be_mended(directory):
    expected = uninterrupted(directory)
    (directory / "run.py").write_text(program())
    command = [sys.executable, str(directory / "run.py")]
    done = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, -1)),
    )
    assert done.returncode == 1
    assert "cannot write out.stage/000000: File too large" in done.stderr
    assert outputs(directory) == {}
    subprocess.run(command, cwd=directory, check=True)
    assert outputs(directory) == expected


class Fails(BytesTokenizer):
    """Bytes, but for one text."""

    def encode(self, text):
        if text == "kill":
            raise DataError("the text that kills")
        return super().encode(text)


class Killed(BaseException):
    """Ends a run as a signal would."""


@contextmanager
def killed_before_rename_of(monkeypatch, suffix):
    def replace_until_killed(source, target, replace=os.replace):
        if str(target).endswith(suffix):
            raise Killed
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("megatron.data.token_files.publish.os.replace", replace_until_killed)
        yield


@pytest.mark.parametrize("suffix", ["document.bin", "document.idx", "out.report.json"])
def test_what_is_assembled_is_not_published_for_other_wishes(directory, monkeypatch, suffix):
    wishes = conversion(directory)
    with killed_before_rename_of(monkeypatch, suffix):
        preprocess(wishes)
    with pytest.raises(DataError, match="run: each document ended with nothing and ends with 2"):
        preprocess(replace(wishes, append_eod=True))
    with pytest.raises(DataError, match="another run: --dataset-impl was 'mmap' and is 'lazy'"):
        preprocess(replace(wishes, dataset_impl="lazy"))
    with pytest.raises(
        DataError, match="another run: --on-error collect was not given and is 'bad'"
    ):
        preprocess(replace(wishes, on_error="collect", bad_lines_path="bad"))
    path = directory / "a.jsonl"
    status = path.stat()
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match="run: --input .*a.jsonl was last changed at .* run as be"):
        preprocess(wishes)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    preprocess(wishes)
    assert len(IndexedDataset(directory / "out_a_document")) == 290
    assert not (directory / "out.stage").exists()


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("suffix", ["document.bin", "document.idx"])
def test_new_shards_win_over_what_an_earlier_merge_assembled(
    directory, monkeypatch, num_shards, suffix
):
    wishes = conversion(directory)
    for shard in range(num_shards):
        convert_share(wishes, shard, num_shards)
    with killed_before_rename_of(monkeypatch, suffix):
        merge_shards(wishes)
    (directory / "a.jsonl").write_text('{"a": "new"}\n' * 20)
    with pytest.raises(
        DataError, match="another run: --input .*a.jsonl had .* bytes and has 260, "
    ):
        merge_shards(wishes)
    with pytest.raises(
        DataError, match="another run: --input .*a.jsonl had .* bytes and has 260, "
    ):
        convert_share(wishes, 0, num_shards)
    for shard in range(num_shards):
        convert_share(replace(wishes, resume=False), shard, num_shards)
    merge_shards(wishes)
    assert (directory / "out_a_document.bin").read_bytes() == b"n\0e\0w\0" * 20
    assert len(IndexedDataset(directory / "out_a_document")) == 20


def test_shards_that_are_assembled_have_nothing_to_resume(directory, monkeypatch):
    wishes = conversion(directory)
    convert_share(wishes, 0, 1)
    with killed_before_rename_of(monkeypatch, "document.idx"):
        merge_shards(wishes)
    assert not (directory / "out.stage" / "000000" / "0.bin").exists()
    convert_share(wishes, 0, 1)
    assert merge_shards(wishes)[0].documents == 290


def test_what_is_assembled_goes_before_the_parts_it_is_of(directory, monkeypatch):
    """Otherwise a run that is killed in between publishes an index without its tokens."""
    wishes = conversion(directory)
    preprocess(wishes)
    with killed_before_rename_of(monkeypatch, "document.bin"):
        preprocess(wishes)

    def killed(folders):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("megatron.data.preprocessing.preprocess.remove_folders", killed)
        preprocess(replace(wishes, resume=False))
    assert not (directory / "out.stage" / "publish.json").exists()


def test_work_of_an_earlier_version_is_not_published_unseen(directory, monkeypatch):
    wishes = conversion(directory)
    with killed_before_rename_of(monkeypatch, "document.idx"):
        preprocess(wishes)
    path = directory / "out.stage" / "publish.json"
    said = json.loads(path.read_text())
    del said["options"]
    path.write_text(json.dumps(said))
    with pytest.raises(DataError, match="work of an earlier version; remove"):
        preprocess(wishes)
    preprocess(replace(wishes, resume=False))
    assert len(IndexedDataset(directory / "out_a_document")) == 290


@pytest.mark.parametrize("content", ["", '{"pairs": []', '{"pairs": []}', "[]"])
def test_a_damaged_list_of_assembled_files_is_an_error(directory, monkeypatch, content):
    spec = conversion(directory)
    with killed_before_rename_of(monkeypatch, "document.bin"):
        preprocess(spec)
    path = directory / "out.stage" / "publish.json"
    path.write_text(content)
    for again in (preprocess, merge_shards, lambda spec: convert_share(spec, 0, 1)):
        with pytest.raises(DataError, match=r"publish\.json is damaged .* remove it"):
            again(spec)
    path.unlink()
    assert preprocess(spec)[0].documents == 290


def test_damaged_options_of_finished_shards_are_an_error(directory):
    convert_share(conversion(directory), 0, 2)
    (path,) = (directory / "out.stage").glob("options-*.json")
    path.write_text(path.read_text()[:50])
    with pytest.raises(DataError, match="options-.* is damaged .* without --resume"):
        convert_share(conversion(directory, append_eod=True), 0, 2)


def conversion(directory, **wishes):
    wishes = {"make_encoder": BytesTokenizer, "json_keys": ("a",), "resume": True} | wishes
    wishes = {"shard_bytes": 1500} | wishes
    inputs = (str(directory / "a.jsonl"),)
    return PreprocessSpec(inputs=inputs, output_prefix=str(directory / "out"), **wishes)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"append_eod": True}, "each document ended with nothing and ends with 256 now"),
        ({"tokenizer": {"name": "b"}}, "the tokenizer's name was 'a' and is 'b'"),
        ({"json_keys": ("b",)}, "--json-keys was 'a' and is 'b'"),
    ],
)
def test_other_wishes_are_not_mixed_into_a_stage(directory, other, message):
    convert_share(conversion(directory, tokenizer={"name": "a"}), 0, 2)
    with pytest.raises(DataError, match=f"of another conversion: {message}"):
        convert_share(conversion(directory, **({"tokenizer": {"name": "a"}} | other)), 0, 2)


def test_a_changed_input_is_not_mixed_into_a_stage(directory):
    convert_share(conversion(directory), 0, 2)
    with (directory / "a.jsonl").open("a") as file:
        file.write('{"a": "more"}\n')
    with pytest.raises(DataError, match="--input .*a.jsonl had .* bytes and has"):
        convert_share(conversion(directory), 0, 2)


def test_without_resume_a_stage_is_begun_again(directory):
    convert_share(conversion(directory, tokenizer={"name": "a"}), 0, 1)
    other = conversion(directory, tokenizer={"name": "b"}, resume=False)
    convert_share(other, 0, 1)
    assert len(merge_shards(other)) == 1


def test_missing_shards_are_named(directory):
    with pytest.raises(DataError, match="there are no shards to merge"):
        merge_shards(conversion(directory))
    convert_share(conversion(directory), 0, 2)
    with pytest.raises(DataError, match=r"\d of \d+ shards in .*out.stage are not finished \(0000"):
        merge_shards(conversion(directory))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"append_eod": True}, "each document ended with 256 and ends with nothing now"),
        ({"json_keys": ("b",)}, "--json-keys was 'b' and is 'a'"),
        ({"tokenizer": {"name": "b"}}, "the tokenizer's name was 'b' and is not given"),
        ({"max_memory_mb": 9}, "the longest line that --max-memory-mb allows was 589824 and is 6"),
    ],
)
def test_shards_of_other_options_are_not_merged(directory, other, message):
    convert_share(conversion(directory), 0, 2)
    convert_share(conversion(directory, resume=False, **other), 1, 2)
    with pytest.raises(DataError, match=f"of another conversion: {message}"):
        merge_shards(conversion(directory))
    convert_share(conversion(directory, resume=False), 1, 2)
    assert len(merge_shards(conversion(directory))) == 1


def test_shards_of_an_input_that_changed_between_them_are_not_merged(directory):
    """A shuffled file has its length still: its lines would be there twice, or not at all."""
    path = directory / "a.jsonl"
    convert_share(conversion(directory, empty_documents="keep"), 0, 2)
    lines = path.read_text().splitlines(keepends=True)
    random.Random(1).shuffle(lines)
    path.write_text("".join(lines))
    convert_share(conversion(directory, append_eod=True, resume=False), 1, 2)
    with pytest.raises(DataError) as caught:
        merge_shards(conversion(directory, append_eod=True))
    for problem in ("--input ", "each document ended with nothing", "--empty-documents was 'keep'"):
        assert problem in str(caught.value)


def test_shards_of_the_same_file_on_another_machine_are_merged(directory):
    """A copy that keeps its date is the same input; its inode and its owner do not count."""
    convert_share(conversion(directory), 0, 2)
    path = directory / "a.jsonl"
    shutil.copy2(path, directory / "copy")
    os.replace(directory / "copy", path)
    convert_share(conversion(directory), 1, 2)
    assert merge_shards(conversion(directory))[0].documents == 290


def test_sentences_of_two_models_are_not_mixed(directory, monkeypatch):
    """NLTK's data were installed after the first shard, or on one node alone."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")

    class Installed(punkt.PunktSentenceTokenizer):
        def __init__(self, lang):
            super().__init__()
            self._params.abbrev_types.add("dr")

    def missing(lang):
        raise LookupError

    wishes = conversion(directory, split_sentences=True)
    monkeypatch.setattr(punkt, "PunktTokenizer", missing)
    convert_share(wishes, 0, 2)
    convert_share(wishes, 1, 2)
    monkeypatch.setattr(punkt, "PunktTokenizer", Installed)
    change = "the model that splits sentences was 'trained on the input, .*' and is 'NLTK data for english, "
    with pytest.raises(DataError, match=f"of another conversion: {change}"):
        convert_share(wishes, 1, 2)
    convert_share(replace(wishes, resume=False), 1, 2)
    with pytest.raises(DataError, match=f"of another conversion: {change}"):
        merge_shards(wishes)
    monkeypatch.setattr(punkt, "PunktTokenizer", missing)
    with pytest.raises(
        DataError, match="of another conversion: the model that splits sentences was 'N"
    ):
        merge_shards(wishes)
    convert_share(replace(wishes, resume=False), 1, 2)
    assert merge_shards(wishes)[0].documents == 290


def test_a_stage_that_does_not_say_its_model_of_sentences_is_not_resumed(directory):
    """Of an earlier version; without sentences such a stage goes on."""
    pytest.importorskip("nltk.tokenize.punkt")
    for split_sentences in (False, True):
        wishes = conversion(directory, split_sentences=split_sentences)
        convert_share(replace(wishes, resume=False), 0, 1)
        for path in (directory / "out.stage").glob("options-*.json"):
            options = json.loads(path.read_text())
            del options["the model that splits sentences"]
            path.write_text(json.dumps(options))
        if not split_sentences:
            convert_share(wishes, 0, 1)
            continue
        with pytest.raises(DataError, match="the model that splits sentences was not given and is"):
            convert_share(wishes, 0, 1)


def test_finished_shards_are_those_of_any_number_of_ranks_and_workers(directory):
    wishes = conversion(directory, append_eod=True, json_keys=("a", "b"))
    expected = uninterrupted(directory)
    convert_share(wishes, 0, 2)
    convert_share(wishes, 2, 3)
    marker = directory / "out.stage" / "000000" / "finished.json"
    before = marker.stat().st_mtime_ns
    convert_share(replace(wishes, workers=2), 0, 1)
    assert marker.stat().st_mtime_ns == before
    preprocess(wishes)
    assert outputs(directory) == expected


def test_work_of_an_earlier_version_is_not_begun_again_in_silence(directory):
    (directory / "out.stage" / "00000-of-00001").mkdir(parents=True)
    (directory / "out.stage" / "00000-of-00001" / "state.json").write_text("{}")
    with pytest.raises(DataError, match="an earlier version, which cannot be resumed; run without"):
        preprocess(conversion(directory))
    assert preprocess(conversion(directory, resume=False))[0].documents == 290


def test_a_kill_while_tokens_are_joined_loses_none(directory, monkeypatch):
    """A shard's own tokens are removed as soon as they are in the file of all."""
    wishes = conversion(directory, append_eod=True, json_keys=("a", "b"))
    expected = uninterrupted(directory)
    monkeypatch.setattr("megatron.data.preprocessing.assemble._BATCH_BYTES", 1)
    removed, unlink = [], Path.unlink

    def unlink_until_killed(path, **how):
        if path.name == "0.bin":
            removed.append(path)
            if len(removed) == 3:
                raise Killed
        unlink(path, **how)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "unlink", unlink_until_killed)
        preprocess(wishes)
    assert not removed[0].exists()
    assert removed[2].exists()
    preprocess(wishes)
    assert outputs(directory) == expected
    with monkeypatch.context() as patch, pytest.raises(Killed):
        removed.clear()
        patch.setattr(Path, "unlink", unlink_until_killed)
        preprocess(wishes)
    (directory / "out.stage" / "0.bin").unlink()
    with pytest.raises(DataError, match="tokens of finished shards are missing"):
        preprocess(wishes)


@pytest.mark.parametrize("kind", ["gzip", "pipe"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_packed_input_is_resumed_shard_by_shard(directory, monkeypatch, kind, workers):
    path = directory / "a.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[150] = '{"a": "kill", "b": "b"}\n'
    path.write_text("".join(lines))
    expected = uninterrupted(directory)
    path.write_bytes(gzip.compress(path.read_bytes()))
    wishes = conversion(directory, append_eod=True, json_keys=("a", "b"), shard_bytes=200)
    if kind == "pipe":
        wishes = replace(wishes, inputs=("-",))

    def run(wishes):
        with path.open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            preprocess(wishes)

    with pytest.raises(DataError, match="line 151: the text that kills"):
        run(replace(wishes, make_encoder=Fails, workers=workers))
    assert len([*directory.glob("out.stage/*/finished.json")]) > 3
    run(replace(wishes, workers=workers))
    assert outputs(directory) == expected


STREAMS = """
import sys
sys.path[:0] = [{root!r}, {here!r}]
from bytes_tokenizer import BytesTokenizer
from megatron.data.preprocessing.preprocess import preprocess
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec

if __name__ == "__main__":
    preprocess(PreprocessSpec(inputs=tuple(sys.argv[1:]), output_prefix="out",
        make_encoder=BytesTokenizer, shard_bytes=200, json_keys=("a",), workers=2))
"""


@pytest.mark.parametrize("kinds", [["-", "gz"], ["pipe", "pipe"]])
def test_workers_convert_stdin_and_pipes_that_only_the_first_process_has(tmp_path, kinds):
    """There are as many packed inputs as workers, which could unpack one each if all were files."""
    here = str(ROOT / "tests")
    (tmp_path / "run.py").write_text(STREAMS.format(root=str(ROOT), here=here))
    texts = [f'{{"a": "{letter}"}}\n'.encode() * 50 for letter in "xy"]
    (tmp_path / "b.gz").write_bytes(gzip.compress(texts[1], compresslevel=0))
    inputs, pipes = [], []
    for kind, text in zip(kinds, texts, strict=True):
        if kind == "pipe":
            reading, writing = os.pipe()
            os.write(writing, text)
            os.close(writing)
            pipes.append(reading)
        inputs.append({"-": "-", "gz": "b.gz", "pipe": f"/dev/fd/{(pipes or [0])[-1]}"}[kind])
    subprocess.run(
        [sys.executable, "run.py", *inputs],
        cwd=tmp_path,
        input=texts[0],
        pass_fds=pipes,
        check=True,
    )
    for pipe in pipes:
        os.close(pipe)
    assert (tmp_path / "out_a_document.bin").read_bytes() == b"x\0" * 50 + b"y\0" * 50


def test_a_pipe_behind_files_belongs_to_the_only_rank(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "x"}\n')
    os.mkfifo(tmp_path / "fifo")
    shards = plan_shards(find_sources([str(tmp_path / "a.jsonl"), str(tmp_path / "fifo")]))
    assert shards_of_rank(shards, 0, 1) == shards


@pytest.mark.parametrize("name", ["0.bin", "0.sizes", "0.hashes"])
def test_a_shard_whose_content_a_power_failure_took_is_converted_again(directory, caplog, name):
    """Its length is as recorded, and what had not reached the disk is zero."""
    spec = conversion(directory)
    preprocess(replace(spec, resume=False))
    expected = outputs(directory)
    convert_share(spec, 0, 1)
    damaged = directory / "out.stage" / "000001" / name
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(DataError, match=r"1 of \d+ shards in .* are not finished \(000001\)"):
        merge_shards(spec)
    assert f"out.stage/000001 counts as not finished: {name} is not what was written" in caplog.text
    preprocess(spec)
    assert outputs(directory) == expected


def test_tokens_that_were_not_joined_before_a_power_failure_are_missed(directory, monkeypatch):
    spec = conversion(directory)
    with killed_before_rename_of(monkeypatch, "document.bin"):
        preprocess(spec)
    (directory / "out.stage" / "publish.json").unlink()
    (directory / "out.stage" / "0.joined").write_text("9")
    with pytest.raises(DataError, match="tokens of finished shards are missing"):
        preprocess(spec)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_resumed_run_logs_the_shards_it_skips_and_counts_each_byte_once(
    directory, caplog, monkeypatch, is_packed
):
    path = directory / "a.jsonl"
    if is_packed:
        path.write_bytes(gzip.compress(path.read_bytes(), compresslevel=0))
    spec = conversion(directory, shard_bytes=1500)
    num_bytes = []

    class Counting(Progress):
        def add(self, documents, tokens, num):
            super().add(documents, tokens, num)
            num_bytes.append(self.bytes)

    monkeypatch.setattr("megatron.data.preprocessing.preprocess.Progress", Counting)
    convert_share(spec, 0, 1)
    finished = sorted((directory / "out.stage").glob("*/finished.json"))
    finished[-1].unlink()
    finished[-2].unlink()
    with caplog.at_level("INFO", "megatron"):
        convert_share(spec, 0, 1)
    assert f"--resume: skips {len(finished) - 2} finished shards" in caplog.text
    assert num_bytes[-1] == pytest.approx(path.stat().st_size, rel=0.01)


@pytest.mark.parametrize("keep", [None, 4])
@pytest.mark.parametrize("name", ["0.sizes", "0.hashes", "0.counts", "1.bin", "finished.json"])
def test_a_damaged_shard_counts_as_not_finished(directory, caplog, name, keep):
    pytest.importorskip("nltk.tokenize.punkt")
    wishes = conversion(directory, json_keys=("a", "b"), split_sentences=True)
    preprocess(replace(wishes, resume=False))
    expected = outputs(directory)
    convert_share(wishes, 0, 1)
    for path in directory.glob("out_*"):
        path.unlink()
    damaged = directory / "out.stage" / "000002" / name
    if keep is None and name in ("1.bin", "finished.json"):
        damaged.write_bytes(b"")
    elif keep is None:
        damaged.unlink()
    else:
        os.truncate(damaged, keep)
    with pytest.raises(DataError, match=r"1 of \d+ shards in .* are not finished \(000002\)"):
        merge_shards(wishes)
    assert f"out.stage/000002 counts as not finished: {name} " in caplog.text
    convert_share(wishes, 0, 1)
    merge_shards(wishes)
    assert outputs(directory) == expected


def test_a_damaged_piece_of_a_packed_input_is_converted_again(directory):
    path = directory / "a.jsonl"
    path.write_bytes(gzip.compress(path.read_bytes()))
    wishes = conversion(directory, shard_bytes=200)
    preprocess(replace(wishes, resume=False))
    expected = outputs(directory)
    convert_share(wishes, 0, 1)
    os.truncate(directory / "out.stage" / "000000-000003" / "0.sizes", 4)
    with pytest.raises(DataError, match=r"1 of 1 shards in .* are not finished \(000000\)"):
        merge_shards(wishes)
    preprocess(wishes)
    assert outputs(directory) == expected


def test_shards_without_their_bad_lines_are_refused_on_stop(directory, monkeypatch):
    with (directory / "a.jsonl").open("a") as file:
        file.write("no JSON\n")
    skip = conversion(directory, on_error="skip")
    stop = conversion(directory)
    message = "--on-error stop: .*out.stage holds finished work that left out 1 bad lines"
    convert_share(skip, 0, 1)
    for again in (merge_shards, preprocess, lambda spec: convert_share(spec, 0, 1)):
        with pytest.raises(DataError, match=message):
            again(stop)
    with killed_before_rename_of(monkeypatch, "document.idx"):
        merge_shards(skip)
    with pytest.raises(DataError, match=message):
        merge_shards(stop)
    assert merge_shards(skip)[0].bad == 1


def test_two_runs_do_not_write_to_one_stage(directory):
    (directory / "run.py").write_text(program(pause=0.05))
    command = [sys.executable, str(directory / "run.py")]
    first = subprocess.Popen(command, cwd=directory)
    try:
        deadline = time.monotonic() + 60
        while not (directory / "out.stage" / "000000").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(DataError, match="another process writes to"):
            preprocess(conversion(directory))
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("last", range(4))
def test_no_pair_is_without_the_record_of_its_tokenizer(directory, monkeypatch, last):
    preprocess(conversion(directory, record="older", resume=False))
    older = (directory / "out_a_document.bin").read_bytes()
    replace, moves = os.replace, []

    def replace_until_killed(source, target):
        if str(target).startswith(str(directory / "out_a_document")):
            if len(moves) == last:
                raise Killed
            moves.append(target)
        replace(source, target)

    wishes = {"record": "newer", "append_eod": True}
    with monkeypatch.context() as patch:
        patch.setattr("megatron.data.token_files.publish.os.replace", replace_until_killed)
        with suppress(Killed):
            preprocess(conversion(directory, resume=False, **wishes))
    assert len(moves) == min(last, 3)
    record = directory / "out_a_document.tokenizer.json"
    if (directory / "out_a_document.idx").exists():
        is_older = (directory / "out_a_document.bin").read_bytes() == older
        assert record.read_text() == ("older" if is_older else "newer")
    preprocess(conversion(directory, **wishes))
    assert record.read_text() == "newer"
    assert (directory / "out_a_document.bin").read_bytes() != older
    assert not [*directory.glob("*.new"), *directory.glob("out.stage")]


def test_a_failed_run_leaves_the_older_record(directory):
    preprocess(conversion(directory, record="older", resume=False))
    (directory / "a.jsonl").write_text('{"a": ""}\n')
    with pytest.raises(DataError, match="nothing to write"):
        preprocess(conversion(directory, record="newer", resume=False))
    assert (directory / "out_a_document.tokenizer.json").read_text() == "older"
    assert not [*directory.glob("*.new")]


def test_a_pair_of_an_unknown_tokenizer_has_no_record(directory):
    preprocess(conversion(directory, record="older", resume=False))
    preprocess(conversion(directory, resume=False))
    assert not (directory / "out_a_document.tokenizer.json").exists()


@pytest.mark.parametrize("suffix", ["tokenizer.json", "document.bin"])
def test_a_killed_run_leaves_its_record_to_no_other(directory, monkeypatch, suffix):
    with killed_before_rename_of(monkeypatch, suffix):
        preprocess(conversion(directory, record="of a killed run"))
    (directory / "out_a_document.tokenizer.json").unlink(missing_ok=True)
    preprocess(conversion(directory, resume=False))
    assert (directory / "out_a_document.idx").exists()
    assert not [*directory.glob("*.tokenizer.json*")]
