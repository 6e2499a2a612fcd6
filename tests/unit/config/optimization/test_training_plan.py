"""How long a run is, which iterations it passes over, and how large the network must be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.common.errors import ConfigError
from megatron.config.optimization.training import is_skipped, plan_skips
from megatron.config.run.checkpoint import starts_in_place

RAMP = ["--global-batch-size", "8", "--rampup-batch-size", "2", "2", "24"]


def trained(plan):
    """Return iterations, samples and tokens when the run's limit of tokens is reached."""
    iteration = samples = tokens = 0
    while tokens < plan.training.train_tokens:
        iteration += 1
        size = plan.batch.size_at(samples)
        samples += size
        if not is_skipped(iteration, plan.training.skips):
            tokens += size * plan.curriculum.length_at(iteration)
    return iteration, samples


def with_curriculum(tmp_path):
    block = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 2,
        "max_difficulty": 6,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 9, "difficulty_step": 2},
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"curriculum_learning": block}))
    return ["--deepspeed_config", str(file)]


@pytest.mark.parametrize("tokens", [1, 12, 100, 777, 5000])
@pytest.mark.parametrize("ramp", [[], RAMP], ids=["constant", "ramp"])
def test_a_number_of_tokens_is_a_length(tokens, ramp, tmp_path):
    flags = [*ramp, *with_curriculum(tmp_path), "--skip-train-iteration-range", "3-5", "30-31"]
    plan = tiny_plan("--train-tokens", str(tokens), *flags, without=("--train-iters",))
    assert (plan.training.train_iters, plan.training.train_samples) == trained(plan)


def test_a_number_of_tokens_limits_a_run_of_iterations():
    short = tiny_plan("--train-tokens", "40").training  # 2 samples of 6 tokens a step
    assert (short.train_iters, short.train_samples, short.train_tokens) == (4, 8, 40)
    assert tiny_plan("--train-tokens", "4000").training.train_iters == 10


@pytest.mark.parametrize(
    ("texts", "ranges"),
    [
        (None, ()),
        (["4-6"], ((4, 6),)),
        (["8-9", "2-3"], ((2, 3), (8, 9))),
        (["2-5", "4-7", "7-8"], ((2, 8),)),
        # Those that only touch stay two.
        (["2-3", "4-5"], ((2, 3), (4, 5))),
        (["1_000-2_000", "1500-1600"], ((1000, 2000),)),
    ],
)
def test_ranges_that_overlap_are_one(texts, ranges):
    assert plan_skips(texts) == ranges


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=6))
def test_merged_ranges_hold_the_same_iterations(ranges):
    texts = [f"{first}-{first + more}" for first, more in ranges]
    merged = plan_skips(texts)
    for iteration in range(1, 45):
        requested = any(first <= iteration <= first + more for first, more in ranges)
        assert is_skipped(iteration, merged) == requested
    assert all(last < first for (_, last), (first, _) in zip(merged, merged[1:], strict=False))


@pytest.mark.parametrize("text", ["5", "5-", "-5", "7-5", "0-3", "a-b", "1-2-3", "1_-2"])
def test_a_range_that_is_none_is_told(text):
    with problem("FIRST-LAST"):
        tiny_plan(f"--skip-train-iteration-range={text}")


def test_the_size_of_the_network_can_be_asked_for():
    parameters = tiny_plan().model.num_parameters
    assert 1000 < parameters < 3000
    for text in (str(parameters), f"{parameters / 1000 * 1.04:.3f}K", f"{parameters / 1e9:.9f}b"):
        assert tiny_plan("--expect-params", text)
    for text in (f"{parameters / 1000 * 1.06:.3f}K", "1.3B"):
        with problem(f"{parameters:,} parameters"):
            tiny_plan("--expect-params", text)
    with problem("K, M, B or T"):
        tiny_plan("--expect-params", "large")


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ([], False),
        (["--eval-only"], True),
        (["--eval-only", "True"], True),
        (["--eval-only", "False"], False),
        (["--no-train"], True),
    ],
)
def test_eval_only_may_be_followed_by_its_truth(words, on):
    assert tiny_config(*words).evaluation.eval_only is on


def test_a_truth_that_is_none_is_refused():
    with problem("'perhaps' … True … False"):
        tiny_config("--eval-only", "perhaps")


def test_without_an_interval_there_is_one_evaluation():
    plan = tiny_plan("--eval-interval", "0", "--eval-iters", "3", "--split", "1,1,1")
    assert not any(plan.evaluation.is_due(i) for i in range(20))
    assert plan.data.valid[0].num_samples == 3 * 2
    assert tiny_plan("--eval-interval", "4").evaluation.is_due(8)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval-only", "--eval-only needs --load"),
        ("--inference --load a --eval-iters 0", "--inference with --eval-iters 0 leaves nothing"),
        ("--inference --load a --zero-stage 3", "write --eval-only instead"),
        ("--finetune", "--finetune needs --load"),
        ("--no-save-rng", "--no-save-rng needs --save"),
        (
            "--no-save-optim --save a --save-interval 1 --zero-stage 3",
            "--no-save-optim: at ZeRO stage 3 the weights are in the optimizer's files",
        ),
        ("--profile", "--profile needs --profile-dir, or --tensorboard-dir"),
        ("--profile --profile-dir a --profile-step-end 9", "--profile-step-end 9 must be more"),
        ("--profile --profile-dir a --profile-ranks 0 4", "--profile-ranks 4: the run has ranks"),
        ("--nvtx-ranges", "--nvtx-ranges needs GPUs"),
        ("--wandb-exp-name a", "--wandb-exp-name needs --wandb-project"),
        ("--slow-rank-factor 1", "--slow-rank-factor 1.0 must be more than 1"),
        ("--slow-rank-factor 2 --zero-stage 3", "cannot find slow ranks at ZeRO stage 3"),
        ("--slow-rank-factor 2", "compares replicas, and this run has no second one"),
        ("--device-peak-tflops 0", "--device-peak-tflops 0.0 must be more than 0"),
        ("--codecarbon-country-iso-code France", "is not a code of three letters, such as FRA"),
        ("--exit-duration-in-mins 0", "--exit-duration-in-mins 0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_told(flags, message):
    with pytest.raises(ConfigError) as caught:
        tiny_plan(*flags.split())
    assert any(message in problem for problem in caught.value.problems), caught.value.problems


def test_weights_alone_are_loaded_to_finetune_or_evaluate():
    def parts(*flags):
        plan = tiny_plan("--load", "a", *flags).checkpoint
        return plan.loads_optimizer, plan.loads_streams, plan.loads_progress

    assert parts() == (True, True, True)
    assert parts("--finetune") == (False, False, False)
    assert parts("--reset-progress") == (True, True, False)
    assert parts("--no-load-optim") == (False, True, True)
    assert parts("--no-load-rng") == (True, False, True)
    assert parts("--eval-only")[:2] == (False, False)


def test_a_directory_is_the_same_however_it_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    save = ["--save", "run", "--save-interval", "1"]
    for written in ("run", "./run/", "other/../run", str(tmp_path / "run"), "link"):
        plan = tiny_plan(*save, "--load", written).checkpoint
        assert (plan.load, plan.must_exist) == ("run", False)
        assert starts_in_place(tiny_config(*save, "--load", written, "--finetune").checkpoint)
    plan = tiny_plan(*save, "--load", "run2/").checkpoint
    assert (plan.load, plan.must_exist) == ("run2", True)
    assert not starts_in_place(tiny_config(*save, "--load", "run2/", "--finetune").checkpoint)
