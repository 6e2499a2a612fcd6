"""Length of a run in epochs of labelled files, and what is reported of epochs that cannot be."""

import pytest
from problems import problem, require_problem

from megatron.common.errors import WrongDataError
from megatron.config.config import parse_config
from megatron.config.objectives import declaration_of
from megatron.extensions.tasks.data.text_flags import TextTaskConfig, text_task_problems
from megatron.extensions.tasks.epochs import with_steps_of_epochs
from megatron.extensions.tasks.flags import DownstreamConfig, downstream_problems

TASK = """
    --task MNLI --valid-data dev.tsv --num-layers 1 --hidden-size 8 --num-attention-heads 1
    --seq-length 8 --micro-batch-size 1 --lr 0
"""


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["--epochs", "0"], "--epochs 0 needs --load"),
        (["--epochs", "1"], "--train-data is missing"),
        (["--epochs", "-1"], "--epochs -1 must be at least 0"),
    ],
)
def test_a_missing_flag_is_named_as_it_is_written(words, missing):
    config = with_steps_of_epochs(parse_config([*TASK.split(), *words])[0], world_size=1)
    assert not config.evaluation.eval_only
    found = downstream_problems(config.section(DownstreamConfig), "classification", loads=False)
    assert missing in "\n".join(found)


def test_epochs_are_missing_where_no_flag_sets_the_length():
    with problem("--epochs … missing … --task MNLI"):
        with_steps_of_epochs(parse_config(TASK.split())[0], world_size=1)
    config = parse_config([*TASK.split(), "--train-iters", "3"])[0]
    assert with_steps_of_epochs(config, world_size=1) == config


SENTENCES = "a\t0\nb\t1\nc\t0\nd\t2\ne\t0\n"


def text_task(file, *words):
    file.write_text(SENTENCES)
    task = TASK.replace("MNLI", "text-classification").split()
    files = ["--train-data", str(file), "--vocab-file", "none", "--epochs", "1"]
    return with_steps_of_epochs(parse_config([*task, *files, *words])[0], world_size=1)


def test_labels_are_those_of_the_training_data(tmp_path):
    config = text_task(tmp_path / "train.tsv", "--epochs", "2")
    assert config.section(TextTaskConfig).labels == ["0", "1", "2"]
    assert config.training.train_iters == 10
    config = text_task(tmp_path / "train.tsv", "--num-labels", "4")
    assert config.section(TextTaskConfig).labels == ["0", "1", "2", "3"]


def test_a_run_of_epochs_and_iterations_ends_with_what_comes_first(tmp_path):
    for iterations, expected in ((3, 3), (30, 10)):
        words = ("--epochs", "2", "--train-iters", str(iterations))
        assert text_task(tmp_path / "train.tsv", *words).training.train_iters == expected


def test_epochs_count_the_steps_of_every_flag_that_sets_the_batch_size(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 4}')
    sizes = (
        ("--gas", "2"),
        ("--global-batch-size", "2"),
        ("--deepspeed_config", str(tmp_path / "ds.json")),
    )
    steps = [text_task(tmp_path / "train.tsv", *words).training.train_iters for words in sizes]
    assert steps == [2, 2, 1]


@pytest.mark.parametrize(
    "words", ["--step-batch-size-schedule 0:1 80:2", "--rampup-batch-size 1 1 8"]
)
def test_batches_of_an_epoch_have_one_size(tmp_path, words):
    with problem(f"--epochs 1 … {words.split()[0]}"):
        text_task(tmp_path / "train.tsv", *words.split())
    config = parse_config([*TASK.split(), "--train-iters", "3", *words.split()])[0]
    found = declaration_of("classification").problems(config)
    require_problem(f"{words.split()[0]} … --task MNLI", found)


def test_samples_do_not_count_an_epoch_too(tmp_path):
    with problem("--epochs 1 … --train-samples"):
        text_task(tmp_path / "train.tsv", "--train-samples", "8")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--labels a b c --num-labels 2", "--num-labels 2 … 3 … a b c"),
        ("--labels a b --negative-label c", "--negative-label c … a b"),
        ("--labels a b --head-dropout 0.1", "--head-dropout … --head-layers"),
        ("--num-labels 1", "--num-labels 1 … 2"),
    ],
)
def test_labels_that_contradict_each_other(words, parts):
    config = parse_config([*TASK.split(), *words.split()])[0]
    found = text_task_problems(
        config.section(TextTaskConfig),
        "text-classification",
        seq_length=8,
        num_files=1,
        has_folder=True,
    )
    require_problem(parts, found)


def test_a_label_beyond_their_number_is_named(tmp_path):
    with problem("line 4 … '2' … 0, 1", WrongDataError):
        text_task(tmp_path / "train.tsv", "--num-labels", "2")


def test_a_file_of_predictions_needs_a_file_to_predict_and_a_folder(tmp_path):
    config = text_task(tmp_path / "train.tsv", "--output-prediction-file", "p")
    found = {
        (num_files, has_folder): [
            *text_task_problems(
                config.section(TextTaskConfig),
                "question-answering",
                seq_length=99,
                num_files=num_files,
                has_folder=has_folder,
            )
        ]
        for num_files, has_folder in ((0, True), (1, False), (1, True), (2, True))
    }
    require_problem("--output-prediction-file p … --valid-data", found[0, True])
    require_problem("--output-prediction-file p … --save", found[1, False])
    assert "output" not in str(found[1, True])
    require_problem("--output-prediction-file p … one file", found[2, True])
