"""A pretrained BERT is finetuned on every kind of task, in every layout; all metrics are exact."""

import json
import os

from problems import problem

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from functools import cache
from pathlib import Path
from tempfile import gettempdir

import pytest
import torch
import torch.distributed as dist
from labelled_files import (
    CLASSES,
    write_mnli,
    write_race,
    write_relations,
    write_squad,
    write_sst2,
    write_stsb,
    write_tagged,
    write_topics,
    write_vocabulary,
)
from ranks import TIMEOUT_S, outcomes_on_ranks, require_passed
from stood_in import stood_in
from training_here import train_here

from megatron.checkpointing.manifest import published_tags, read_manifest
from megatron.checkpointing.resharding.layouts import read_sharded
from megatron.common.errors import WrongCheckpointError
from megatron.common.registry import OBJECTIVES
from megatron.config.config import parse_config
from megatron.engine.deepspeed import distributed
from megatron.extensions.tasks.flags import objective_of
from megatron.tensor_parallel.linear import is_adapter
from megatron.training.process.device import prepare_process

TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
NETWORK = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --device cpu
    --init-method-std 0.1 --hidden-dropout 0 --attention-dropout 0
    --make-vocab-size-divisible-by 8 --log-interval 100 --eval-interval 30 --eval-iters 1
    --lr 0.003 --lr-warmup-fraction 0.1
"""
POOLER = {"7.pooler.weight", "7.pooler.bias"}
PRETRAINING = 150
"""Steps of 32 samples."""


@cache
def folder():
    """Return the directory that both ranks share, with labelled files in it."""
    shared = [None]
    if dist.get_rank() == 0:
        path = Path(gettempdir()) / f"classification-{os.getppid()}-{os.getpid()}"
        path.mkdir()
        write_vocabulary(path / "vocab.txt")
        write_mnli(path / "MNLI" / "train.tsv", 161)
        write_mnli(path / "MNLI" / "dev_matched.tsv", 21, seed=1)
        write_mnli(path / "MNLI" / "dev_mismatched.tsv", 14, seed=2)
        write_race(path / "RACE" / "train", 120)
        write_race(path / "RACE" / "dev" / "middle", 13, seed=1)
        write_race(path / "RACE" / "dev" / "high", 7, seed=2)
        write_sst2(path / "SST-2" / "train.tsv", 80, words=slice(4))
        write_sst2(path / "SST-2" / "dev.tsv", 60, words=slice(4, 8), seed=1)
        (path / "RTE").mkdir()
        (path / "RTE" / "dev.tsv").write_text("index\ta\tb\tlabel\n0\tw1\tw2\tentailment\n")
        write_stsb(path / "STS-B" / "train.tsv", 160)
        write_stsb(path / "STS-B" / "dev.tsv", 61, seed=1)
        for name, count, seed in (("train", 160, 0), ("dev", 21, 1)):
            write_tagged(path / f"{name}.conll", count, seed=seed)
            write_squad(path / f"{name}.json", count, seed=seed)
        for name, count, words in (("train", 160, slice(4)), ("dev", 41, slice(4, 8))):
            write_tagged(path / f"few-{name}.conll", count, words=words)
            write_squad(path / f"few-{name}.json", count, words=words)
            write_relations(path / f"few-{name}.tsv", count, words=words)
        write_topics(path / "topics", 200)
        shared = [path]
    dist.broadcast_object_list(shared)
    return shared[0]


def train(words, *flags, objective="classification"):
    """Train by the command line, as a program does, in this process."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    distributed.start("gloo")
    with stood_in(as_gpu=False):
        command = f"{NETWORK} --vocab-file {folder()}/vocab.txt {words}".split()
        config, notices = parse_config([*command, *flags])
        launch, device = prepare_process(config.parallel)
        train_here(config, launch, device, OBJECTIVES.get(objective)(), notices=notices)
    dist.barrier()


def finetune(task, words, *flags, architecture="bert"):
    """Finetune on a task."""
    of_task = {
        "MNLI": "--train-data MNLI/train.tsv --valid-data MNLI/dev_matched.tsv MNLI/dev_mismatched.tsv",
        "RACE": "--train-data RACE/train --valid-data RACE/dev/middle RACE/dev/high",
    }.get(task, f"--train-data {task}/train.tsv --valid-data {task}/dev.tsv")
    paths = " ".join(
        str(folder() / word) if word.startswith(task) else word for word in of_task.split()
    )
    train(
        f"--task {task} {paths} {words}",
        *flags,
        objective=objective_of(task, causal=architecture == "gpt"),
    )


@cache
def pretrained():
    """Return the directory of a BERT that is pretrained on sentences, a topic in each document."""
    train(
        f"--data-path {folder()}/topics --train-iters {PRETRAINING} --micro-batch-size 16 "
        f"--save {folder()}/bert",
        objective="bert",
    )
    return folder() / "bert"


def records(save, event):
    lines = (folder() / save / "journal.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def scores(save):
    return [(r["epoch"], r["set"], r["accuracy"]) for r in records(save, "task")]


def losses(save):
    return {r["iteration"]: r["lm_loss"] for r in records(save, "step")}


def weights(directory):
    """Return the full weights of the newest checkpoint."""
    tag = directory / published_tags(directory)[0]
    full = read_sharded(tag, read_manifest(tag), optimizer=False)
    return {name: state.weight for name, state in full.parameters.items()}


def tables(directory):
    """Return the lines of the tables of predictions, without their headers, by file."""
    files = sorted(directory.glob("predictions_*.tsv"))
    return {f.stem: [line.split("\t") for line in f.read_text().splitlines()[1:]] for f in files}


def a_pretrained_bert_learns_from_few_words(rank):
    begins_at, ends_at = (losses(pretrained().name)[i] for i in (1, PRETRAINING))
    assert begins_at > 3.5 > 2.8 > ends_at  # the words of a topic are known, not which of them
    shared = "--epochs 2 --global-batch-size 8"
    layouts = {
        "data": "--micro-batch-size 4",
        "tensor": f"{TENSOR} 2 --micro-batch-size 8",
        "pipeline": f"{PIPELINE} 2 --micro-batch-size 4",
    }
    for task, metric, least, names in (
        ("SST-2", "accuracy", 0.9, ("data", "tensor")),
        ("STS-B", "pearson", 0.7, ("data", "pipeline")),
    ):
        for name in names:
            save = f"{task}-{name}"
            words = f"{shared} {layouts[name]} --pretrained-checkpoint {pretrained()}"
            finetune(task, f"{words} --save {folder()}/{save}")
            assert losses(save) == pytest.approx(losses(f"{task}-data"), rel=0.05, abs=0.01)
            found = records(save, "task")[-1][metric]
            assert found > least, f"{save}: {metric} {found}"
    # No word of the file is one that was finetuned on: all that is known of them is their topic.
    finetune("SST-2", f"{shared} --micro-batch-size 4 --save {folder()}/unknowing")
    assert scores("unknowing")[-1][2] < 0.8


def a_gpt_learns_with_the_state_of_the_last_token(rank):
    gpt = folder() / "gpt"
    shared = "--tokenizer-type BertWordPieceLowerCase --global-batch-size 8"
    train(
        f"--data-path {folder()}/topics --train-iters 60 --micro-batch-size 16 --save {gpt} "
        "--tokenizer-type BertWordPieceLowerCase",
        objective="gpt",
    )
    layouts = {
        "data": "--micro-batch-size 4",
        "tensor": f"{TENSOR} 2 --sequence-parallel --micro-batch-size 8",
        "pipeline": f"{PIPELINE} 2 --micro-batch-size 4",
    }
    for task, least, names in (("SST-2", 0.9, layouts), ("RACE", 0.45, ("data", "pipeline"))):
        for name in names:
            save = f"gpt-{task}-{name}"
            words = f"{shared} {layouts[name]} --epochs 2 --pretrained-checkpoint {gpt}"
            finetune(task, f"{words} --save {folder()}/{save}", architecture="gpt")
            assert losses(save) == pytest.approx(losses(f"gpt-{task}-data"), rel=0.05, abs=0.01)
            assert scores(save)[-1][2] > least, f"{save}: {scores(save)}"
    best, words = folder() / "gpt-SST-2-data" / "best", f"{shared} --epochs 0"
    with problem("--task SST-2 … --task RTE", WrongCheckpointError):
        finetune("RTE", f"{words} --micro-batch-size 4 --load {best}", architecture="gpt")
    found = []
    for name, layout in layouts.items():
        save = folder() / f"gpt-{name}-again"
        evaluates = f"{words} {layout} --load {best} --save {save}"
        finetune("SST-2", evaluates, architecture="gpt")
        found.append([line[:3] for line in tables(save)["predictions_dev"]])
        assert sum(line[1] == line[2] for line in found[-1]) / 60 == pytest.approx(
            json.loads((best / "best.json").read_text())["score"]
        )
    assert found[0] == found[1] == found[2]
    twice = folder() / "gpt-twice"
    for stop in ("--exit-interval 13", ""):
        words = f"{shared} {layouts['data']} --epochs 2 --load {twice} --save {twice} {stop}"
        finetune("SST-2", f"{words} --pretrained-checkpoint {gpt}", architecture="gpt")
    assert losses("gpt-twice") == losses("gpt-SST-2-data")


def every_layout_learns_mnli_alike(rank):
    batch = "--epochs 2 --keep-last-batch --global-batch-size 8"
    batch += f" --pretrained-checkpoint {pretrained()}"
    finetune("MNLI", f"{batch} --micro-batch-size 4 --save {folder()}/data")
    steps = losses("data")
    assert len(steps) == 2 * 21
    for name, words in (
        ("tensor", f"{TENSOR} 2 --sequence-parallel --micro-batch-size 8"),
        ("pipeline", f"{PIPELINE} 2 --micro-batch-size 4"),
        ("zero", "--zero-stage 3 --micro-batch-size 2"),
        ("sequence", "--ds-sequence-parallel-size 2 --micro-batch-size 8"),
    ):
        finetune("MNLI", f"{batch} {words} --save {folder()}/{name}")
        # Behind the first 20 batches two replicas get one of the 161 samples twice.
        found = losses(name)
        assert [found[i] for i in range(1, 21)] == pytest.approx(
            [steps[i] for i in range(1, 21)], rel=1e-2
        )
        assert scores(name)[-1][2] > 0.8
    assert scores("data")[-1][2] > 0.8
    # All 35 samples count, and none of them twice.
    assert {each[1] for each in scores("data")} == {"dev-matched", "dev-mismatched", "overall"}
    assert all((each[2] * 35) % 1 == pytest.approx(0) for each in scores("data")[2::3])


def predictions_of_any_layout_are_the_same(rank):
    found = []
    for number, words in enumerate(("--micro-batch-size 4", f"{PIPELINE} 2 --micro-batch-size 3")):
        best = folder() / "data" / "best"
        save = folder() / f"predicted{number}"
        finetune("MNLI", f"--epochs 0 {words} --load {best} --save {save}")
        found.append(tables(save))
        (_, (chances, labels, ids)), _ = torch.load(
            save / "predictions_dev-matched_dev-mismatched.pt"
        )
        assert ids == list(range(21))
        assert [len(row) for row in chances] == [3] * 21
        assert [CLASSES[label] for label in labels] == [
            line[2] for line in tables(save)["predictions_dev-matched"]
        ]
    assert [*found[0]] == ["predictions_dev-matched", "predictions_dev-mismatched"]
    best = json.loads((folder() / "data" / "best" / "best.json").read_text())
    rows = [row for lines in found[0].values() for row in lines]
    assert sum(row[1] == row[2] for row in rows) / len(rows) == pytest.approx(best["score"])
    assert best["score"] == max(each[2] for each in scores("data")[2::3])
    for one, other in zip(rows, [row for lines in found[1].values() for row in lines], strict=True):
        assert one[:3] == other[:3]
        assert [*map(float, one[3:])] == pytest.approx([*map(float, other[3:])], abs=1e-5)


def race_counts_questions(rank):
    words = f"--epochs 2 --global-batch-size 8 --pretrained-checkpoint {pretrained()}"
    words, tensor = f"{words} --micro-batch-size 4", f"{words} {TENSOR} 2 --micro-batch-size 8"
    finetune("RACE", f"{words} --save {folder()}/race --tensorboard-dir {folder()}/tensorboard")
    assert len(losses("race")) == 2 * 15
    assert all((each[2] * 20) % 1 == pytest.approx(0) for each in scores("race")[2::3])
    (events,) = (folder() / "tensorboard").glob("*tfevents*")
    for name in ("dev-middle", "dev-high", "overall"):
        assert f"RACE-validation/{name}/accuracy".encode() in events.read_bytes()
    finetune("RACE", f"{words} {PIPELINE} 2 --save {folder()}/race-pipeline")
    finetune("RACE", f"{tensor} --save {folder()}/race-tensor")
    for name in ("race", "race-pipeline", "race-tensor"):
        assert losses(name) == pytest.approx(losses("race"), rel=5e-2)
        assert scores(name)[-1][2] > 0.6, f"{name}: {scores(name)}"


def a_run_resumed_within_an_epoch_is_the_uninterrupted_one(rank):
    words = "--epochs 2 --micro-batch-size 2 --hidden-dropout 0.1"
    once, twice = folder() / "once", folder() / "twice"
    finetune("MNLI", f"{words} --save {once} --load {once}")
    for stop in ("--exit-interval 47", ""):
        finetune("MNLI", f"{words} --save {twice} --load {twice} {stop}")
    assert losses("twice") == losses("once")
    assert scores("twice") == scores("once")
    # Of a run that was killed behind the save of its last epoch, that epoch is evaluated.
    dist.barrier()
    if rank == 0:
        journal = once / "journal.jsonl"
        lines = journal.read_text().splitlines()
        kept = [line for line in lines if json.loads(line).get("epoch") != 1]
        journal.write_text("\n".join(kept) + "\n")
    dist.barrier()
    assert scores("once") == scores("twice")[:3]
    for _ in range(2):
        dist.barrier()
        finetune("MNLI", f"{words} --save {once} --load {once}")
        assert scores("once") == scores("twice")
    final, resumed = weights(once), weights(twice)
    assert all(torch.equal(final[name].all(), resumed[name].all()) for name in final)


def pretrained_weights_begin_a_run_that_has_no_checkpoint(rank):
    bert = pretrained()
    words = f"--train-iters 1 --lr 0 --weight-decay 0 --micro-batch-size 4 {TENSOR} 2"
    finetune("MNLI", f"{words} --pretrained-checkpoint {bert} --save {folder()}/begun")
    before, begun = weights(bert), weights(folder() / "begun")
    shared = {*before} & {*begun}
    assert {*begun} - shared == {"7.classification_head.weight", "7.classification_head.bias"}
    assert {*before} - shared == {
        *(f"7.{layer}.{kind}" for layer in ("dense", "layernorm") for kind in ("weight", "bias")),
        *("7.binary_head.weight", "7.binary_head.bias", "9.output_bias"),
    }
    for name in shared:
        weight = before[name].all()
        # Two tensor-parallel ranks need more padding of the vocabulary.
        assert torch.equal(weight, begun[name].all()[: len(weight)]), name
    finetune(
        "MNLI",
        f"--train-iters 2 --micro-batch-size 4 {PIPELINE} 2 --lora-rank 2 "
        f"--pretrained-checkpoint {bert} --save {folder()}/adapted",
    )
    adapted = weights(folder() / "adapted")
    changed = {
        name for name in shared if not torch.equal(*(w[name].all() for w in (before, adapted)))
    }
    assert changed == POOLER
    trained = {*adapted} - shared
    assert sum(is_adapter(name) for name in trained) == 4 and len(trained) == 6
    assert all(adapted[name].all().abs().max() > 0 for name in trained)
    with problem("--hidden-size", WrongCheckpointError):
        finetune("MNLI", f"{words} --pretrained-checkpoint {bert} --hidden-size 16")
    evaluates = f"--epochs 0 --micro-batch-size 4 --save {folder()}/chance"
    for flag in ("--load", "--pretrained-checkpoint"):
        with problem("no head … --task MNLI", WrongCheckpointError):
            finetune("MNLI", f"{evaluates} {flag} {bert}")
    with problem("chance … no checkpoint", WrongCheckpointError):
        finetune("MNLI", f"{evaluates} --load {folder()}/chance")
    with problem("--pretrained-checkpoint none … no such dir", WrongCheckpointError):
        finetune("MNLI", f"{words} --pretrained-checkpoint none")
    lora = f"--epochs 1 --micro-batch-size 8 --pretrained-checkpoint {bert} --lora-rank 2"
    finetune("MNLI", f"{lora} --save {folder()}/lora")
    adapted = weights(folder() / "lora")
    moved = {name for name in shared if not torch.equal(adapted[name].all(), before[name].all())}
    assert moved == POOLER
    assert bool(adapted["7.classification_head.bias"].all().any())


def heads_on_each_token_learn_alike_in_every_layout(rank):
    tensor = f"{TENSOR} 2 --sequence-parallel --micro-batch-size 8"
    layouts = {"d": "--micro-batch-size 4", "t": tensor, "p": f"{PIPELINE} 2 --micro-batch-size 4"}
    for task, suffix, options, metric, least in (
        ("token-classification", "conll", "--head-dropout 0", "entity f1", 0.9),
        ("question-answering", "json", "--max-query-length 4", "f1", 80),
    ):
        files = f"--train-data {folder()}/train.{suffix} --valid-data {folder()}/dev.{suffix}"
        shared = f"--task {task} {files} {options} --global-batch-size 8"
        predicted = []
        for name, layout in layouts.items():
            save = folder() / f"{suffix}-{name}"
            stop = "" if name == "d" else "--exit-interval 30"
            train(f"{shared} {layout} --epochs 6 {stop} --save {save}", objective=task)
            if name == "d":
                assert [record[metric] for record in records(save.name, "task")][-1] > least
                continue
            expected = {i: loss for i, loss in losses(f"{suffix}-d").items() if i <= 30}
            assert losses(save.name) == pytest.approx(expected, rel=5e-2, abs=5e-3)
            # Of one checkpoint, whatever the layout.
            best, again = folder() / f"{suffix}-d" / "best", folder() / f"{suffix}-{name}-again"
            words = f"{shared} {layout} --epochs 0 --load {best} --save {again}"
            train(words, *labels_of(best), objective=task)
            (path,) = again.glob("predictions_dev*")
            path = path / "predictions.json" if path.is_dir() else path
            predicted.append(path.read_text())
        assert predicted[0] == predicted[1]


def text_tasks_are_learned_from_few_words(rank):
    """No word of the files to evaluate on is one that was finetuned on, as above."""
    for task, suffix, options, metric, least in (
        ("token-classification", "conll", "--head-dropout 0", "entity f1", 0.8),
        ("question-answering", "json", f"--max-query-length 4 {_WRITTEN}", "f1", 75),
        ("text-classification", "tsv", _RELATIONS, "relation f1", 0.8),
    ):
        files = (
            f"--train-data {folder()}/few-train.{suffix} --valid-data {folder()}/few-dev.{suffix}"
        )
        words = f"--task {task} {files} {options.format(folder())} --epochs 3 --micro-batch-size 4"
        save = folder() / f"few-{suffix}"
        start = f"--pretrained-checkpoint {pretrained()}"
        train(f"{words} {start} --save {save}", objective=objective_of(task))
        found = [record[metric] for record in records(save.name, "task")]
        assert found[-1] > least, f"{task}: {found}"
    answers = json.loads((folder() / "answers.json").read_text())
    assert len(answers) == 41  # written by the training


_WRITTEN = "--output-prediction-file {}/answers.json"
_RELATIONS = (
    "--head-layers 2 --head-dropout 0 --class-balancing weighted_loss --negative-label false "
    "--labels false CPR:3 CPR:4"
)


def labels_of(directory):
    tag = directory / published_tags(directory)[0]
    head = read_manifest(tag).spec.head
    labels = head.labels if head else ()
    return ["--labels", *labels] if labels else []


CHECKS = [
    a_pretrained_bert_learns_from_few_words,
    a_gpt_learns_with_the_state_of_the_last_token,
    every_layout_learns_mnli_alike,
    predictions_of_any_layout_are_the_same,
    race_counts_questions,
    a_run_resumed_within_an_epoch_is_the_uninterrupted_one,
    pretrained_weights_begin_a_run_that_has_no_checkpoint,
    heads_on_each_token_learn_alike_in_every_layout,
    text_tasks_are_learned_from_few_words,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    # Many trainings, which take long on a machine that does other work too.
    folder = tmp_path_factory.mktemp("ranks")
    return outcomes_on_ranks(2, CHECKS, folder, timeout_s=2 * TIMEOUT_S)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_downstream_tasks(check, outcomes):
    require_passed(check, outcomes)
