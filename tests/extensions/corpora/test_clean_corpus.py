"""A corpus cleaned by tasks: the output of the single tools, for any tasks, workers and kills."""

import gzip
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bytes_tokenizer import BytesTokenizer
from children import status_of_fork
from problems import problem
from texts import english

from megatron.common.errors import BusyError, ConfigError, DataError, MegatronError
from megatron.data.preprocessing.preprocess_spec import PreprocessSpec
from megatron.extensions.corpora.cleaning.filters import NAMES, DatatroveFilter, filter_factories
from megatron.extensions.corpora.cleaning.records import Line
from megatron.extensions.corpora.corpus.executors import Executor
from megatron.extensions.corpora.corpus.spec import CorpusSpec
from megatron.extensions.corpora.corpus.steps import Step, corpus_steps, make_folders

TOOLS = Path(__file__).parents[3] / "tools"
QUESTION = " ".join(f"secret{i}" for i in range(13))
FILTERS = ("remove_512", "ftfy_fix_text")


def records():
    """Return documents with near copies, short texts, and n-grams of an evaluation."""
    texts = [english(i, 12) for i in range(30)]
    texts[7] = f"{english(7, 20)} {QUESTION}. {english(8, 20)}"
    texts[4] += " It was schÃ¶n."
    texts += [texts[i] + " One more sentence." for i in (3, 11, 29)]
    texts += [texts[30] + " And one.", "Too short.", english(99, 9)]
    return [{"url": f"http://a.org/{i}", "text": text} for i, text in enumerate(texts)]


@pytest.fixture
def corpus(write, tmp_path):
    """Return a function that makes the steps of a run in a folder of its own."""
    raw = write("raw.jsonl", records())
    write("lambada.jsonl", [{"text": QUESTION}])

    def make(name, *, tasks, inputs=(raw,), workers=1, **options):
        folder = tmp_path / name
        spec = CorpusSpec(
            inputs=inputs,
            folder=folder / "work",
            tasks=tasks,
            filters=filter_factories(FILTERS),
            evaluations=(("lambada", str(tmp_path / "lambada.jsonl")),),
            **options,
        )
        make_folders(spec)
        tokens = PreprocessSpec(
            inputs=(),
            output_prefix=str(folder / "corpus"),
            make_encoder=BytesTokenizer,
            append_eod=True,
        )
        executor = Executor(name="local", folder=spec.folder, workers=workers)
        return spec, corpus_steps(spec, tokens), executor

    return make


def run(steps, executor):
    assert executor.run(steps)
    return outputs(executor.folder.parent)


def outputs(folder):
    """Return the cleaned documents and the content of the token files and the report."""
    files = sorted((folder / "work" / "cleaned").glob("*.jsonl"))
    names = ("corpus_text_document.bin", "corpus_text_document.idx", "corpus.corpus.json")
    contents = [(folder / name).read_bytes() for name in names]
    return [b"".join(path.read_bytes() for path in files), *contents]


def load_tool(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.main


def test_output_is_that_of_the_single_tools(corpus, tmp_path, monkeypatch, read, capsys):
    _, steps, executor = corpus("one", tasks=3)
    cleaned, *_ = run(steps, executor)
    monkeypatch.chdir(tmp_path)
    web = TOOLS / "openwebtext"
    for name, *words in (
        ("cleanup_fix_dataset", "--input-files", "raw.jsonl", "--output-path", ".", "--tasks",
         *FILTERS),
        ("find_duplicates", "--inputs", "raw_cleaned.json", "url", "--output", "pairs.jsonl",
         "--num-bands", "20"),
        ("group_duplicate_url", "pairs.jsonl", "groups.jsonl"),
        ("remove_group_duplicates", "groups.jsonl", "raw_cleaned.json", "unique.json"),
        ("filter_ngrams", "--tasks", "lambada", "--lambada-path", "lambada.jsonl",
         "--dedup-dataset", "unique.json", "text", "--output", "out.json"),
    ):  # fmt: skip
        load_tool(web / f"{name}.py")(words)
    assert cleaned == (tmp_path / "out.json").read_bytes()
    assert len(read("groups.jsonl")) == 3
    report = json.loads((tmp_path / "one" / "corpus.corpus.json").read_text())
    assert report["documents"] == {
        "read": 36, "dropped by remove_512": 1, "changed by remove_512": 0,
        "dropped by ftfy_fix_text": 0, "changed by ftfy_fix_text": 1, "duplicates": 4, "with n-grams": 1,
        "dropped with n-grams": 0, "left": 32,
    }  # fmt: skip


def test_output_does_not_depend_on_tasks_and_workers(corpus):
    _, steps, executor = corpus("one", tasks=1)
    expected = run(steps, executor)
    # Processes take seconds to start: one step has several, the tasks of others come last first.
    for tasks, workers, parallel in ((2, 2, "1-filter_documents"), (5, 3, "3-compare_candidates")):
        spec, steps, executor = corpus(f"of-{tasks}", tasks=tasks, workers=workers)
        for step in steps:
            if step.name == parallel:
                assert executor.run([step])
            else:
                for task in reversed(range(step.tasks)):
                    step.run(task)
        assert outputs(spec.folder.parent) == expected
    assert expected[0].count(b"\n") == 32


def test_output_is_the_same_after_kills_at_every_publication(corpus):
    _, steps, executor = corpus("whole", tasks=2)
    expected = run(steps, executor)
    _, steps, executor = corpus("killed", tasks=2)
    ends = []

    def run_killed(attempt):
        kill_at_rename(attempt, is_after=(attempt - 1) % 2)
        executor.run(steps)

    # The first attempt is killed at its first rename, the second at its second, and so on; every
    # other one after the rename and not before.
    while not ends or ends[-1] == signal.SIGKILL:
        ends.append(status_of_fork(run_killed, len(ends) + 1))
        assert len(ends) < 40
    assert ends[-1] == 0
    assert len(ends) > 5
    assert outputs(executor.folder.parent) == expected


def kill_at_rename(number, *, is_after):
    rename, count = os.replace, [0]

    def replace(*names):
        count[0] += 1
        if count[0] == number:
            if is_after:
                rename(*names)
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*names)

    os.replace = replace


def test_inputs_may_be_compressed_or_tables(corpus, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    _, steps, executor = corpus("plain", tasks=2)
    expected = run(steps, executor)
    parts = records()[:15], records()[15:]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in parts[0])
    parquet.write_table(pyarrow.Table.from_pylist(parts[1]), tmp_path / "b.parquet")
    inputs = (str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.parquet"))
    _, steps, executor = corpus("packed", tasks=2, inputs=inputs)
    assert run(steps, executor) == expected


def test_a_corpus_without_a_document_left_is_an_error(corpus, write):
    raw = write("short.jsonl", [{"text": "short", "url": "u"}])
    _, steps, executor = corpus("one", tasks=2, inputs=(raw,))
    with problem("no document … remove_512: 1", MegatronError):
        executor.run(steps)
    raw = write("bad.jsonl", [{"text": "short"}, {"body": 1}])
    _, steps, executor = corpus("two", tasks=1, inputs=(raw,))
    with problem("bad.jsonl, line 2 … 'text'", DataError):
        executor.run(steps)


def test_duplicates_stay_where_they_are_wanted(corpus):
    _, steps, executor = corpus("one", tasks=2, similarity=None)
    assert run(steps, executor)[0].count(b"\n") == 36


def test_slurm_runs_each_step_as_an_array_after_the_one_before(corpus, monkeypatch, tmp_path):
    dill = pytest.importorskip("dill")
    slurm = pytest.importorskip("datatrove.executor.slurm")
    _, steps, local = corpus("local", tasks=2)
    expected = run(steps, local)

    _, steps, here = corpus("cluster", tasks=2)
    folder = here.folder
    submitted = []

    def submit(script, job_id_of, *arguments):
        submitted.append((script, arguments))
        return str(len(submitted))

    monkeypatch.setattr(slurm, "launch_slurm_job", submit)
    monkeypatch.setattr(slurm, "expand_slurm_nodelist", lambda nodes: [nodes])
    monkeypatch.setenv("SLURM_NODELIST", "node1")
    options = {"time": "1:00:00", "partition": "cpu", "account": "me"}
    executor = Executor(name="slurm", folder=folder, workers=2, slurm=options, path="/program")
    assert not executor.run(steps)
    arrays = [each for each in submitted if "launch_pickled_pipeline" in each[0]]
    assert len(arrays) == len(steps)
    assert "--dependency=afterok:1" in arrays[1][1]
    for line in ("--array=0-1%2", "--time=1:00:00", "--partition=cpu", "--account=me"):
        assert f"#SBATCH {line}\n" in arrays[0][0]
    assert "PYTHONPATH=/program:$PYTHONPATH" in arrays[0][0]

    def run_array(script):
        (path,) = re.findall(r"launch_pickled_pipeline (\S+)", script)
        for task in (1, 0):
            monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
            with open(path, "rb") as file:
                dill.load(file).run()
        monkeypatch.delenv("SLURM_ARRAY_TASK_ID")

    for script, _ in arrays[:2]:
        run_array(script)
    submitted.clear()
    assert not executor.run(steps)  # of which two steps are finished
    arrays = [each for each in submitted if "launch_pickled_pipeline" in each[0]]
    assert len(arrays) == len(steps) - 2
    for script, _ in arrays:
        run_array(script)
    assert executor.run(steps)
    assert outputs(folder.parent) == expected


def test_a_second_process_is_refused(corpus):
    _, steps, executor = corpus("one", tasks=1)
    other = Executor(name="local", folder=executor.folder, workers=1)
    step = steps[0]
    nested = type(step)(step.name, lambda task: other.run(steps), 1)
    with problem("another process", BusyError):
        executor.run([nested])


def test_finished_tasks_are_counted_in_the_log(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("megatron.common.progress.EVERY_S", 0.0)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    caplog.set_level("INFO", "megatron")
    executor = Executor(name="local", folder=tmp_path, workers=1)
    assert executor.run([Step("filter", lambda task: None, 2)])
    assert [line.partition(" | ")[0] for line in caplog.messages] == [
        "step filter: 2 of 2 tasks to run",
        "step filter: 1 of 2 tasks",
        "step filter: 2 of 2 tasks",
    ]


def test_a_filter_of_datatrove_drops_documents():
    pytest.importorskip("datatrove")
    keep = DatatroveFilter("c4_paragraphs")
    texts = ["One paragraph.", "\n".join([english(1)] * 3)]
    lines = [Line("a", 1, 0, json.dumps({"text": text}).encode()) for text in texts]
    dropped, kept = keep(lines)
    assert (dropped.dropped_by, kept.dropped_by) == ("c4_paragraphs", None)
    assert kept.line == lines[1].raw


def test_the_tool_prints_counts_and_refuses_wrong_flags(write, tmp_path, monkeypatch, capsys):
    from tokenizers import pre_tokenizers

    monkeypatch.chdir(tmp_path)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    write("raw.jsonl", records())
    clean = load_tool(TOOLS / "corpora" / "clean.py")
    words = "--input raw.jsonl --output-prefix out --tokenizer-type GPT2BPETokenizer "
    words += "--vocab-file vocab.json --merge-file merges.txt --append-eod --tasks 2 "
    with monkeypatch.context() as change:
        # A corpus that has no output yet continues where it was stopped.
        change.setattr(Executor, "forget_finished", None)
        clean([*words.split(), "--filters", *FILTERS])
    assert "read: 36 | dropped by remove_512: 1" in (printed := capsys.readouterr().out)
    assert printed.rstrip().endswith("left: 31")
    assert (tmp_path / "out_text_document.idx").exists()
    clean([*words.split(), "--filters", *FILTERS])  # finished
    printed = capsys.readouterr().out
    assert (len(printed.splitlines()), printed.rstrip()[-8:]) == (1, "left: 31")
    token_files = [tmp_path / f"out_text_document.{end}" for end in ("bin", "idx")]
    tokens = [path.read_bytes() for path in token_files]
    for path in token_files:
        path.unlink()
    clean([*words.split(), "--filters", *FILTERS])  # whose output was removed
    assert [path.read_bytes() for path in token_files] == tokens
    assert capsys.readouterr().out.rstrip().endswith("left: 31")
    with problem("other options … --filters … --similarity"):
        clean([*words.split(), "--filters", "none", "--similarity", "1"])
    with problem("other options … --append-eod"):
        clean([*words.replace("--append-eod ", "").split(), "--filters", *FILTERS])
    with problem("cannot read absent.jsonl", DataError):
        missing = words.replace("prefix out", "prefix missing")
        clean([*missing.split(), "--evaluations", "lambada", "absent.jsonl"])
    assert not (tmp_path / "missing.cleaning").exists()
    (tmp_path / "folder").mkdir()
    (tmp_path / "raw.jsonl").rename(tmp_path / "folder" / "train.jsonl")
    of_a_folder = words.replace("raw.jsonl", "folder").replace("prefix out", "prefix other")
    clean([*of_a_folder.split(), "--filters", *FILTERS])
    assert capsys.readouterr().out.rstrip().endswith("left: 31")
    with problem("--output-prefix s3://a/b … folder"):
        at_url = words.replace("prefix out", f"prefix s3://a/b --s3-cache-path {tmp_path}/cache")
        clean(at_url.split())
    bad = "--filters fasttest --similarity 0 --num-seeds 99 --tasks 0 --evaluations lambada "
    bad += "--executor slurm --slurm time"
    with pytest.raises(ConfigError) as caught:
        clean([*words.split(), *bad.split()])
    for message in (
        f"--filters fasttest: no such filter; choose from {', '.join(NAMES)}",
        "--similarity 0.0", "99 is not a multiple", "--tasks 0", "give a file after each name",
        "--slurm time: give NAME=VALUE", "needs --slurm time=LIMIT partition=NAME",
    ):  # fmt: skip
        assert message in str(caught.value)


def test_the_benchmark_prints_each_step():
    words = ["--documents", "60", "--workers", "1", "--tasks", "2", "--words", "20"]
    command = [sys.executable, str(TOOLS.parent / "benchmarks" / "corpora.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [row.split(" | ") for row in done.stdout.splitlines()[2:]]
    assert [row[2] for row in rows][::3] == ["1-filter_documents", "4-find_removed", "7-join"]
    assert rows[-1][2] == "all"
    assert all(int(row[-1].rstrip(" |")) > 0 for row in rows)
