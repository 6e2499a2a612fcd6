"""Samples of instruction tuning: layout, loss, neighbors, blends and flags."""

import json

import numpy as np
import pytest
import torch
from bytes_tokenizer import BytesTokenizer
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.common.errors import ConfigError, WrongDataError
from megatron.config.objectives import declaration_of
from megatron.extensions.retro.objective_instruct import Instruct, InstructRetro
from megatron.training.entry import train_from
from megatron.training.setup import data_request

EOD = 256


class Bytes(BytesTokenizer):
    eod = EOD


@pytest.fixture
def folder(tmp_path):
    """Two sets of questions, of which one is evaluated."""
    for name, count in (("nq", 5), ("oasst", 3)):
        items = [
            {"question": f"{name}{i}", "answer": f"a{i}", "ctxs": ["one", "two", "three"]}
            for i in range(count)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_QA_train.json").write_text(json.dumps(items))
    (tmp_path / "nq" / "nq_QA_dev.json").write_text(json.dumps(items[:1]))
    return tmp_path


def plan_of(folder, *flags, objective="instruct-retro"):
    flags = ("--seq-length", "400", "--data-folder", str(folder), *flags)
    if objective == "instruct-retro":
        flags = ("--num-layers", "6", "--retro-chunk-length", "8", *flags)
    return tiny_plan(*flags, objective=objective)


def sets_of(folder, *flags, objective="instruct-retro"):
    plan = plan_of(folder, *flags, objective=objective)
    own = Instruct() if objective == "instruct" else InstructRetro()
    return own.datasets(data_request(plan), Bytes())


def parts(sample):
    """Return the text in front of the tokens that count, and that of those."""
    first, *_ = np.flatnonzero(sample["is_target"])
    text = sample["tokens"][sample["is_target"] > 0]
    return bytes(sample["tokens"][:first].tolist()), text.tolist()


def test_a_sample_is_prompt_answer_end_and_padding(folder):
    flags = "--data-path", "oasst", "--answer-loss-only", "--use-retrieved-neighbours"
    sample = sets_of(folder, *flags).train[0]
    prompt, answer = parts(sample)
    number = prompt.decode()[-1]
    assert prompt.endswith(f"oasst{number}".encode())
    assert answer == [*f" a{number}".encode(), EOD]
    assert sample["prompt_lengths"] == len(prompt)
    assert (sample["tokens"][len(prompt) + len(answer) :] == EOD).all()
    assert sample["tokens"].shape == (401,)
    everything = sets_of(folder, *flags[:2], *flags[3:]).train[0]
    assert everything["is_target"].sum() == len(prompt) + len(answer)


def neighbors(sample):
    pairs = zip(sample["neighbor_tokens"][0], sample["neighbor_lengths"][0], strict=True)
    return [bytes(tokens[:length].tolist()).decode() for tokens, length in pairs]


def test_the_encoder_gets_contexts_behind_the_prompts(folder):
    flags = "--data-path", "nq", "--use-retrieved-neighbours"
    assert neighbors(sets_of(folder, *flags).train[0]) == ["title: , source:"] * 2
    flags += "--retro-num-retrieved-chunks", "3", "--ft_neighbours", "2"
    assert neighbors(sets_of(folder, *flags).train[0]) == ["title: , source: three", ""]
    first = neighbors(sets_of(folder, *flags, "--reuse-top").train[0])
    assert first == ["title: , source: one", "title: , source: two"]
    assert neighbors(sets_of(folder, "--data-path", "nq").train[0]) == ["", ""]


def test_long_prompts_leave_room_for_the_answer(folder):
    flags = "--data-path", "nq", "--answer-loss-only", "--seq-length", "260"
    sample = sets_of(folder, *flags, "--use-retrieved-neighbours", "--ft_neighbours", "3").train[0]
    prompt, answer = parts(sample)
    assert prompt.endswith(b"The answer is") and answer[-1] == EOD
    assert len(prompt) + len(answer) == 261
    sample = sets_of(folder, *flags[:3], "--seq-length", "20").train[0]
    assert sample["prompt_lengths"] == 20 and not sample["is_target"].any()


def test_a_gpt_gets_no_neighbors(folder):
    sample = sets_of(folder, "--data-path", "nq", objective="instruct").train[0]
    assert {*sample} == {"tokens", "is_target"}


def questions(dataset, count):
    found = [bytes(dataset[i]["tokens"][:-1].clip(max=255).astype(np.uint8)) for i in range(count)]
    return [text.count(b"oasst") > 0 for text in found]


def test_blends_repeat_shuffled_epochs(folder):
    sets = sets_of(folder, "--data-path", "0.75", "nq", "0.25", "oasst", "--eval-iters", "1")
    assert sum(questions(sets.train, 20)) == 5
    uses = sets.uses["train", "train"]
    assert [(use.documents, use.share) for use in uses] == [(5, 0.75), (3, 0.25)]
    assert questions(sets.valid["valid"], 1) == [True]  # the only file of dev, with its questions
    one = sets_of(folder, "--data-path", "nq").train
    order = [one.origin(i).sample for i in range(10)]
    assert sorted(order[:5]) == sorted(order[5:]) == [0, 1, 2, 3, 4]
    flags = "--data-path", "0.75", "nq", "0.25", "oasst", "--dataloader-type", "cyclic"
    other = sets_of(folder, *flags).train
    assert questions(other, 20) != questions(sets.train, 20)


def test_a_batch_weighs_answers_alone(folder):
    plan = plan_of(folder, "--data-path", "nq", "--answer-loss-only")
    objective = InstructRetro()
    train = objective.datasets(data_request(plan), Bytes()).train
    samples = [train[i] for i in range(2)]
    collate = objective.collate(plan.objective, plan.masks, EOD)
    batch = collate(
        **{name: torch.tensor(np.stack([s[name] for s in samples])) for name in samples[0]}
    )
    assert {*batch} == {*objective.batch_fields(plan.masks)}
    for row, sample in enumerate(samples):
        labels = batch["labels"][row][batch["loss_mask"][row] > 0].tolist()
        assert labels == parts(sample)[1]
    assert batch["neighbor_tokens"].shape == (2, 1, 2, 16)
    assert objective.letters(plan.model) == {"c": 1, "k": 2, "r": 16}


def test_missing_files_are_refused(folder):
    with problem("cannot read … tqa_QA_train.json", WrongDataError):
        sets_of(folder, "--data-path", "tqa")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--split", "1,1,1"), "--split … token files"),
        (("--ft_neighbours", "-1"), "--ft_neighbours -1 … 0"),
    ],
)
def test_wrong_flags_are_refused(flags, message, folder):
    with problem(message):
        plan_of(folder, *flags)


def test_a_project_of_pretraining_is_refused():
    with problem("--retro-project-dir … pretrain_retro.py"):
        train_from(["--retro-project-dir", "project"], "instruct-retro", description=None)


def test_the_folder_and_the_names_are_needed():
    with pytest.raises(ConfigError) as raised:
        tiny_plan(objective="instruct", without=("--data-path",))
    assert [problem.split(" is missing")[0] for problem in raised.value.problems] == [
        "--data-path",
        "--data-folder",
    ]


def test_the_baseline_is_a_gpt_on_the_same_questions():
    def trained(name, *flags):
        return declaration_of(name).objective_to_train(tiny_config(*flags), name)

    assert trained("instruct-retro", "--retro-add-retriever") == "instruct-retro"
    assert trained("instruct-retro") == "instruct"
    assert trained("retro") == "gpt"
    assert trained("sft") == "sft"
