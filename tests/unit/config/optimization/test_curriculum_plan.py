"""Sequence lengths over the iterations, against DeepSpeed's own scheduler."""

import json

import pytest
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.config.optimization.curriculum import curriculum_problems, plan_curriculum
from megatron.config.plan.validation import validate

SLOPE = {"total_curriculum_step": 50, "difficulty_step": 8}


def block(schedule, settings, first=8, last=64):
    return {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": first,
        "max_difficulty": last,
        "schedule_type": schedule,
        "schedule_config": settings,
    }


BLOCKS = [
    block("fixed_linear", SLOPE),
    block("fixed_linear", SLOPE, first=16, last=48),
    block("fixed_root", SLOPE | {"root_degree": 2}),
    block("fixed_root", SLOPE | {"root_degree": 3, "difficulty_step": 1}, first=5, last=61),
    block("fixed_discrete", {"difficulty": [8, 24, 64], "max_step": [10, 30]}),
]


@pytest.mark.parametrize("requested", BLOCKS, ids=lambda b: f"{b['schedule_type']}")
def test_lengths_are_those_of_deepspeed(requested):
    scheduler = pytest.importorskip("deepspeed.runtime.data_pipeline.curriculum_scheduler")
    theirs = scheduler.CurriculumScheduler(requested)
    ours = plan_curriculum({"curriculum_learning": requested}, seq_length=64)
    lengths = [ours.length_at(i) for i in range(1, 80)]
    assert lengths == [theirs.get_difficulty(i) for i in range(1, 80)]
    assert lengths[-1] == requested["max_difficulty"]
    assert len(set(lengths)) > 2


def test_without_a_block_samples_are_whole():
    for user in ({}, {"curriculum_learning": {"enabled": False}}):
        plan = plan_curriculum(user, seq_length=64)
        assert (plan.schedule, plan.length_at(1), plan.length_at(10**6)) == ("", 64, 64)


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (3, "curriculum_learning must be an object"),
        (BLOCKS[0] | {"curriculum_type": "vocab"}, "only seqlen, the sequence length, can grow"),
        (BLOCKS[0] | {"schedule_type": "fixed"}, "is not one of fixed_linear, fixed_root"),
        (BLOCKS[0] | {"schedule_config": 1}, "schedule_config must be an object"),
        (BLOCKS[0] | {"max_difficulty": 128}, "must rise and be at most --seq-length 64"),
        (BLOCKS[0] | {"min_difficulty": 12}, "must be multiples of"),
        (block("fixed_root", SLOPE), "root_degree is None, expected a number of at least 1"),
        (block("fixed_linear", SLOPE | {"difficulty_step": 0}), "difficulty_step is 0, expected"),
        (block("fixed_discrete", {"difficulty": [8], "max_step": []}), "needs difficulty, a list"),
        (block("fixed_discrete", {"difficulty": [8, 99], "max_step": [3]}), "99 is more than"),
        (block("fixed_discrete", {"difficulty": [1, 2, 3], "max_step": [3, 3]}), "must rise"),
    ],
)
def test_lengths_that_cannot_be_are_told(requested, message):
    user = {"curriculum_learning": requested}
    (problem,) = curriculum_problems(user, seq_length=64, parts=1, file="ds.json")
    assert problem.startswith("ds.json: curriculum_learning")
    assert message in problem


def test_deepspeed_is_not_told(tmp_path):
    file = tmp_path / "ds.json"
    requested = block("fixed_linear", {"total_curriculum_step": 4, "difficulty_step": 2}, 2, 6)
    file.write_text(json.dumps({"curriculum_learning": requested}))
    plan = tiny_plan("--deepspeed_config", str(file))
    assert "curriculum_learning" not in plan.deepspeed
    assert [plan.curriculum.length_at(i) for i in range(1, 6)] == [2, 4, 4, 6, 6]
    with problem("objective needs"):
        validate(
            tiny_config("--deepspeed_config", str(file)),
            world_size=1,
            device="cpu",
            objective="prefix-lm",
        )


@pytest.mark.parametrize("requested", BLOCKS, ids=lambda b: f"{b['schedule_type']}")
def test_lengths_are_multiples_of_the_processes_that_divide_them(requested):
    user = {"curriculum_learning": requested}
    plan = plan_curriculum(user, seq_length=64)
    for parts in (1, 2, 8, 16, 3):
        fits = all(plan.length_at(i) % parts == 0 for i in range(1, 80))
        problems = [*curriculum_problems(user, seq_length=64, parts=parts, file="ds.json")]
        assert fits or f"{parts} processes divide each sequence" in problems[0]
        # Steps of 8 are refused for 16 even where a schedule happens to skip the odd ones.
        assert not problems or parts != 1
