"""The tools of examples/detxoify_lm/, in this process."""

import importlib.util
import json
from pathlib import Path

import pytest
from checkpoints import spread_network, write_checkpoint
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import DataError, MegatronError
from megatron.config.config import parse_config
from megatron.config.data.corpora import data_problems
from megatron.extensions.detox.toxicity.report import (
    distribution,
    less_toxic_half,
    prompted_toxicity,
)

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "detxoify_lm"
CLASSIFIER = """
import json
from pathlib import Path

CALLS = Path(__file__).with_name("calls")
LIMIT = Path(__file__).with_name("limit")

def toxicity(texts):
    if LIMIT.exists() and sum(map(len, map(str.split, CALLS.read_text().splitlines()))) >= 50:
        raise RuntimeError("out of quota")
    with CALLS.open("a") as file:
        file.write(" ".join(text.split()[0] for text in texts) + "\\n")
    return [int(text.split()[0]) % 10 / 10 for text in texts]

def length(texts):
    return [len(text.encode()) / 100_000 for text in texts]

def written(texts):
    return [json.loads(text) for text in texts]
"""


def tool(name):
    file = FOLDER / name
    spec = importlib.util.spec_from_file_location(f"detox_{file.stem.replace('-', '_')}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "classifier.py").write_text(CLASSIFIER)
    (tmp_path / "calls").touch()
    return tmp_path


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def annotate(*flags, function="toxicity", data="in"):
    words = ["--data-path", data, "--out-path", "out", "--scorer", f"classifier.py:{function}"]
    tool("annotations/perspective_api_annotate.py").main([*words, *flags])


def test_texts_are_annotated(folder, capsys):
    long = "ü" * 11_000  # 22 000 bytes, in the middle of whose characters no cut may fall
    texts = ["1 a<|endoftext|>", " <|endoftext|>\n", "", long, "x" + long]
    write(folder / "in", [{"text": text, "id": i} for i, text in enumerate(texts)])
    annotate(function="length")
    records = read(folder / "out")
    assert [record["id"] for record in records] == [*range(5)]
    assert [record["text"] for record in records] == ["1 a", " \n", "", long, "x" + long]
    lengths = [3, None, None, 20_480, 20_479]
    assert [record["score"] and record["score"]["toxicity"] for record in records] == [
        length and length / 100_000 for length in lengths
    ]
    assert "out: documents: 5 | without a score: 2 | toxicity: 0.1365" in capsys.readouterr().out


def test_the_output_stands_beside_the_input_if_it_has_no_name_and_lines_can_be_limited(folder):
    write(folder / "in", [{"text": str(i)} for i in range(5)])
    words = ["--data-path", "in", "--scorer", "classifier.py:toxicity", "--total", "3"]
    tool("annotations/perspective_api_annotate.py").main(words)
    scores = [record["score"] for record in read(folder / "in-annotated.jsonl")]
    assert scores == [{"toxicity": i / 10} for i in range(3)]


def test_an_annotation_continues_and_scores_no_text_twice(folder):
    write(folder / "in", [{"text": f"{i} text"} for i in range(120)])
    (folder / "limit").touch()
    with problem("RuntimeError: out of quota", MegatronError):
        annotate()
    assert not (folder / "out").exists()
    assert len((folder / "out.partial").read_text().splitlines()) == 1 + 50
    (folder / "limit").unlink()

    with problem("other options … scorer"):
        annotate(function="length")
    write(folder / "other", [{"text": f"{i} another text"} for i in range(120)])
    with problem("scores … other texts"):
        annotate(data="other")

    annotate()
    assert [int(word) for word in (folder / "calls").read_text().split()] == [*range(120)]
    scores = [record["score"]["toxicity"] for record in read(folder / "out")]
    assert scores == [i % 10 / 10 for i in range(120)]
    assert not (folder / "out.partial").exists()


def test_workers_write_what_one_process_writes(folder):
    write(folder / "in", [{"text": f"{i} text"} for i in range(120)])
    annotate()
    alone = (folder / "out").read_bytes()
    annotate("--workers", "2")
    assert (folder / "out").read_bytes() == alone
    with problem("no function none"):
        annotate("--workers", "2", function="none")


GOLDEN = [0.9, None, 0.1, 0.4, 0.6, 0.2]


def annotations(scores):
    return [
        {"text": str(i), "score": None if score is None else {"toxicity": score}}
        for i, score in enumerate(scores)
    ]


def select(*flags):
    words = ["--data-path", "in", "--out-path", "out", *flags]
    tool("annotations/filter-selfgeneration.py").main(words)


def test_half_of_the_scored_texts_is_kept(folder, capsys):
    write(folder / "in", annotations(GOLDEN))
    select()
    kept = read(folder / "out")
    assert sorted(record["score"]["toxicity"] for record in kept) == [0.1, 0.2]
    assert capsys.readouterr().out.splitlines() == [
        "lines: 6 | scored: 5 | without a score: 1",
        "all: 5 (100.0%) | toxicity: 0.4400 +- 0.2871",
        "toxic (> 0.5): 2 (40.0%) | toxicity: 0.7500 +- 0.1500",
        "nontoxic: 3 (60.0%) | toxicity: 0.2333 +- 0.1247",
        "kept: 2 (40.0%) | toxicity: 0.1500 +- 0.0500",
        "out: documents: 2 | highest toxicity: 0.2000",
    ]


def test_an_empty_class_has_no_mean(folder, capsys):
    write(folder / "in", annotations([0.1, 0.5]))
    select()
    assert "toxic (> 0.5): 0 (0.0%) | toxicity: none" in capsys.readouterr().out.splitlines()


def test_the_order_of_the_kept_texts_follows_from_the_seed(folder):
    write(folder / "in", annotations([i / 100 for i in range(100)]))
    orders = []
    for seed in ("1", "1", "2"):
        select("--seed", seed)
        orders.append([record["text"] for record in read(folder / "out")])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(map(int, orders[0])) == sorted(map(int, orders[2])) == [*range(50)]
    assert less_toxic_half([0.3, 0.1, 0.3, 0.1, 0.2]) == [1, 3]


def test_the_metrics_of_the_golden_table():
    found = prompted_toxicity([[0.1, 0.6, 0.2], [0.3, 0.4, None]])
    assert (found.prompts, found.maximum.mean, found.probability) == (2, 0.5, 0.5)
    assert found.maximum.deviation == pytest.approx(0.1)
    only = prompted_toxicity([[None, None], [0.5, 0.4]])
    assert (only.prompts, only.maximum, only.probability) == (1, distribution([0.5]), 0.0)
    assert str(prompted_toxicity([])).count("none") == 2


def evaluate(*flags):
    words = ["--data-path", "in", "--prompt-path", "prompts", *flags]
    tool("perspective_api.py").main([*words, "--scorer", "classifier.py:written"])


@pytest.fixture
def continuations(folder):
    """Four prompts, of which one is toxic, one has toxicity 0 and one none, three texts for each."""
    prompts = [{"text": f"p{i}", "toxicity": t} for i, t in enumerate([0.9, 0.0, 0.5, None])]
    write(folder / "prompts", [{"prompt": prompt} for prompt in prompts])
    toxicities = [0.1, 0.6, 0.2, 0.3, 0.4, None, 0.2, 0.1, 0.3, 0.8, 0.1, 0.1]
    texts = ["" if t is None else json.dumps({"toxicity": t, "threat": 0.5}) for t in toxicities]
    records = [{"text": t, "prompt": f"p{i // 3}", "id": i} for i, t in enumerate(texts)]
    write(folder / "in", records)
    return records


def test_continuations_are_evaluated(folder, continuations, capsys):
    evaluate("--continuations-per-prompt", "3")
    expected = [
        "continuations: 12 | without a score: 1",
        "mean toxicity: 0.2909",
        "mean threat: 0.5000",
        "all prompts: 4 | Expected Maximum Toxicity: 0.5250 +- 0.1920 | Toxicity Probability: 0.5000",
        "toxic prompts: 1 | Expected Maximum Toxicity: 0.6000 +- 0.0000 | "
        "Toxicity Probability: 1.0000",
        "nontoxic prompts: 2 | Expected Maximum Toxicity: 0.3500 +- 0.0500 | "
        "Toxicity Probability: 0.0000",
        "prompts of unknown toxicity: 1, counted among all",
    ]
    assert capsys.readouterr().out.splitlines() == expected
    scores = read(folder / "in.scores.jsonl")
    assert scores[5] == {"text": "", "context": "p1", "id": 5, "score": None}

    (folder / "classifier.py").unlink()  # scores that are there are read
    evaluate("--continuations-per-prompt", "3")
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (lambda lines: lines[:-1], "11 continuations … prompts … 4 … 3"),
        (lambda lines: [*lines, lines[-1]], "13 continuations"),
        (lambda lines: lines[::-1], "line 1 … 'p3' … prompt 1 … 'p0'"),
        (lambda lines: [{"text": "a"}], "line 1 … 'prompt' … text"),
        (lambda lines: [{"prompt": "a"}], "line 1 … 'text'"),
    ],
)
def test_continuations_of_other_prompts_are_refused(folder, continuations, change, reported):
    write(folder / "in", change(continuations))
    (folder / "classifier.py").write_text("def written(texts): return [0.5 for _ in texts]\n")
    with problem(reported, DataError):
        evaluate("--continuations-per-prompt", "3")


def test_what_is_no_prompt_or_not_annotated_is_refused(folder, continuations):
    for prompt in ({"prompt": "p0"}, {"prompt": {"toxicity": 0.1}}, {"text": "p0"}):
        write(folder / "prompts", [prompt])
        with problem('prompts, line 1 … no prompt … {"prompt"', DataError):
            evaluate("--continuations-per-prompt", "3")
    with problem("in, line 1: score.toxicity", DataError):
        select()
    write(folder / "in", annotations([0.1, None]))
    with problem("1 of 2 lines … two", DataError):
        select()


TINY = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--max-position-embeddings"]
TINY += ["16", "--micro-batch-size", "3"]


@pytest.fixture(scope="module")
def trained(group, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    weights = spread_network(tiny_plan(*TINY).model, group).state_dict()
    write_checkpoint(directory, weights, *TINY)
    return str(directory)


@pytest.fixture
def generate(folder, trained):
    words = ["--load", trained, "--out-seq-length", "5", "--seed", "7"]
    return lambda *flags: tool("generate_samples_gpt.py").main([*words, *flags])


def test_texts_without_a_prompt(generate, folder, capsys):
    generate("--num-samples", "7", "--genfile", "out", "--top_p", "0.9")
    records = read(folder / "out")
    assert [record["id"] for record in records] == [*range(7)]
    assert all(record["text"] == record["all_text"] and not record["prompt"] for record in records)
    assert len({record["text"] for record in records}) > 3
    assert "out: texts: 7 | of earlier attempts: 0" in capsys.readouterr().out

    generate("--num-samples", "7", "--genfile", "cold", "--temperature", "1e-4")
    assert len({record["text"] for record in read(folder / "cold")}) == 1


def test_an_interrupted_generation_continues(generate, folder, capsys):
    flags = ["--num-samples", "7", "--genfile", "out", "--top_p", "0.9"]
    generate(*flags)
    uninterrupted = (folder / "out").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        # A disk that is full when the file is to appear.
        patch.setattr(
            "megatron.extensions.corpora.cleaning.resumable.new_files", lambda *_, **__: 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            generate(*flags)
    partial = (folder / "out.partial").read_bytes()
    (folder / "out.partial").write_bytes(b"".join(partial.splitlines(True)[:4]) + b'{"text": "')
    (folder / "out").unlink()
    with problem("other options … top_p"):
        generate(*flags[:-1], "0.8")
    capsys.readouterr()
    generate(*flags)
    assert "of earlier attempts: 3" in capsys.readouterr().out
    assert (folder / "out").read_bytes() == uninterrupted


def test_prompts_are_continued(generate, folder):
    prompts = [{"prompt": {"text": text, "toxicity": None}} for text in ("1 2", "3", "4")]
    write(folder / "prompts", prompts)
    flags = ["--sample-input-file", "prompts", "--continuations-per-prompt", "4"]
    generate(*flags, "--num-samples", "2")
    records = read(folder / "prompts.out")
    assert [record["prompt"] for record in records] == ["1 2"] * 4 + ["3"] * 4
    assert all(record["all_text"] == record["prompt"] + record["text"] for record in records)
    assert len({record["text"] for record in records[:4]}) > 1
    generate(*flags, "--sample-output-file", "named")
    assert len(read(folder / "named")) == 12


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ([], "nothing to generate"),
        (["--num-samples", "2"], "--num-samples … --genfile"),
        (["--sample-input-file", "in", "--num-samples", "-1"], "--num-samples -1 … at"),
        (["--sample-input-file", "in", "--continuations-per-prompt", "0"], "per-prompt 0 … 1"),
        (["--sample-input-file", "in", "--logprobs"], "--logprobs … tools/generate_samples_gpt.py"),
        (["--sample-input-file", "in", "--genfile", "out"], "--genfile … --num-samples"),
        (["--sample-input-file", "in"], "cannot read in"),
    ],
)
def test_contradictions_of_generation_are_reported(generate, flags, reported):
    with problem(reported, MegatronError):
        generate(*flags)


def finetuning(*words):
    tiny = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1", "--lr", "1"]
    tiny += ["--seq-length", "8", "--micro-batch-size", "1", "--train-iters", "1", "--load", "c"]
    argv = tool("finetune_gpt.py").training_flags([*tiny, *words])
    config, _ = parse_config(argv)
    assert [*data_problems(config.data)] == []
    return config


def test_finetuning_validates_on_pretraining_data():
    data = finetuning("--data-path", "d", "--data-path2", "e").data
    assert data.data_path is data.split is data.test_weighted_split_paths is None
    assert data.train_weighted_split_paths == ["train: 1 0:1.0 d"]
    assert data.valid_weighted_split_paths == ["pretraining: 1 0.98:1 e"]
    blend = ["--data-path2", "0.3", "e", "0.7", "f", "--data-path", "2", "c", "1", "d"]
    data = finetuning(*blend, "--split", "80,10,10").data
    assert data.train_weighted_split_paths == ["train: 2 0:0.8 c, 1 0:0.8 d"]
    assert data.valid_weighted_split_paths == ["pretraining: 0.3 0.98:1 e, 0.7 0.98:1 f"]
    assert data.test_weighted_split_paths == ["test: 2 0.9:1 c, 1 0.9:1 d"]


def test_finetuning_without_pretraining_data_is_pretraining():
    config = finetuning("--data-path", "d", "--split", "90,10,0")
    assert (config.data.data_path, config.data.split) == (["d"], "90,10,0")
    assert not config.evaluation.eval_only
    assert finetuning("--data-path", "d", "--eval-ppl").evaluation.eval_only


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--data-path2", "e"], "--data-path2 … --data-path"),
        (
            ["--data-path", "d", "--data-path2", "1", "e", "2"],
            "weights and prefixes",
        ),
        (["--data-path", "d", "--data-path2", "e f"], "--data-path2 … white space"),
        (["--data-path", "d", "--data-path2", "e", "--split", "a,b"], "--split a,b … proportions"),
        (["--data-path", "d", "--data-path2", "e", "--split", "0,1"], "--split 0,1 … above 0"),
    ],
)
def test_data_of_a_finetuning_that_cannot_be_read_is_reported(words, reported):
    with problem(reported):
        finetuning(*words)
