"""DeepSpeed's JSON: every number has one owner."""

import json

import pytest
from problems import problem
from tiny import tiny_plan

from megatron.common.errors import ConfigError


@pytest.fixture
def decide(tmp_path):
    def with_json(content, *flags, world_size=1, device="cpu", without=()):
        file = tmp_path / "ds.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        words = ["--deepspeed_config", str(file), *flags]
        return tiny_plan(*words, world_size=world_size, device=device, without=without)

    return with_json


def test_without_a_file_everything_is_written():
    assert tiny_plan("--global-batch-size", "8", "--clip-grad", "0.5").deepspeed == {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 0},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
    }


def test_reduction_overlaps_where_there_are_replicas(decide):
    def zero(*flags, world_size=2, content=None):
        plan = decide(content or {}, *flags, world_size=world_size)
        return plan.deepspeed["zero_optimization"]

    for stage in ("1", "2", "3"):
        found = zero("--zero-stage", stage)
        assert 25_000_000 <= found["reduce_bucket_size"] <= 100_000_000
        # DeepSpeed's default at stage 3.
        assert stage == "3" or (found["overlap_comm"] and found["contiguous_gradients"])
        # Each bucket goes to the replicas that own it.
        assert stage == "3" or not found["use_multi_rank_bucket_allreduce"]
    found = zero("--bf16")
    assert found["reduce_bucket_size"] == found["allgather_bucket_size"] <= 100_000_000
    assert "overlap_comm" not in found
    stage_2 = ("--zero-stage", "2")
    own = {"zero_optimization": {"overlap_comm": False, "reduce_bucket_size": 7}}
    assert zero(*stage_2, content=own) == own["zero_optimization"] | {
        "stage": 2,
        "contiguous_gradients": True,
        "use_multi_rank_bucket_allreduce": False,
    }
    # DeepSpeed's pipelines overlap nothing, and warn.
    stages = zero("--zero-stage", "1", "--pipeline-model-parallel-size", "2", world_size=4)
    assert "overlap_comm" not in stages
    assert not stages["use_multi_rank_bucket_allreduce"]
    for flags, world_size in (((*stage_2,), 1), ((*stage_2, "--cpu-optimizer"), 2), ((), 2)):
        found = zero(*flags, world_size=world_size)
        assert not {"overlap_comm", "reduce_bucket_size"} & set(found)


def test_bf16_gradients_are_added_at_once_unless_the_json_decides(decide):
    assert decide({}, "--bf16").deepspeed["bf16"]["immediate_grad_update"]
    own = {"bf16": {"immediate_grad_update": False}}
    assert not decide(own, "--bf16").deepspeed["bf16"]["immediate_grad_update"]
    assert "immediate_grad_update" not in decide({}).deepspeed["bf16"]


def test_buckets_need_plain_fp32_sums_of_the_bf16_optimizer(decide):
    def buckets(content, *flags):
        return decide(content, *flags, world_size=2).parallel.bucket_size

    assert buckets({}, "--bf16") == buckets({"gradient_predivide_factor": 1}, "--bf16") > 0
    for content in (
        {"bf16": {"immediate_grad_update": False}},
        {"communication_data_type": "bfp16"},
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"gradient_predivide_factor": 2.0},
        {"prescale_gradients": True},
    ):
        assert buckets(content, "--bf16") == 0, content
    for flags in ((), ("--bf16", "--zero-stage", "2"), ("--bf16", "--cpu-optimizer")):
        assert buckets({}, *flags) == 0, flags


@pytest.mark.parametrize("silent", [{}, {"gradient_clipping": "auto"}])
def test_no_clipping_is_written_too(decide, silent):
    # DeepSpeed's own default is 1.0.
    assert decide(silent, "--clip-grad", "0").deepspeed["gradient_clipping"] == 0


def test_a_file_that_repeats_the_flags_is_fine(decide):
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    flags = ["--global-batch-size", "8", "--clip-grad", "1", "--bf16", "--zero-stage", "1"]
    merged = decide(content, *flags).deepspeed
    assert merged["bf16"].pop("immediate_grad_update")
    assert merged == merged | content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            "train_micro_batch_size_per_gpu is 4, but --micro-batch-size is 2",
        ),
        ({"train_batch_size": 16}, "train_batch_size is 16, but --global-batch-size is 8"),
        (
            {"gradient_accumulation_steps": 2},
            "gradient_accumulation_steps … 2 … --global-batch-size … --micro-batch-size … 4",
        ),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, but --clip-grad is 1.0"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, but --fp16 is False"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true, but --bf16 is False"),
        (
            {"zero_optimization": {"stage": 2}},
            "zero_optimization.stage is 2, but --zero-stage is 1",
        ),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: the learning rate is set by --lr"),
    ],
)
def test_a_contradiction_names_both(decide, content, message):
    with problem(f"ds.json: {message}"):
        decide(content, "--global-batch-size", "8", "--zero-stage", "1")


def test_all_contradictions_are_told_at_once(decide):
    content = {"gradient_clipping": 0.5, "bf16": {"enabled": True}, "scheduler": {"type": "x"}}
    with pytest.raises(ConfigError) as caught:
        decide(content)
    assert len(caught.value.problems) == 3


def test_auto_is_filled_in(decide):
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "overlap_comm": True},
        "steps_per_print": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": "auto",
    }
    merged = decide(content, "--global-batch-size", "8", "--bf16").deepspeed
    assert "auto" not in json.dumps(merged)
    assert merged["train_batch_size"] == 8
    assert merged["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert merged["zero_optimization"] == {"stage": 1, "overlap_comm": True}


def test_keys_without_a_flag_pass_through(decide):
    content = {
        "steps_per_print": 2000,
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": False,
        "comms_logger": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": 5},
        "fp16": {"loss_scale_window": 500},
        "tensor_parallel": {"partition_config": {"layers": [1, {"a": None}]}},
    }
    merged = decide(content).deepspeed
    assert {key: merged[key] for key in content if key not in ("zero_optimization", "fp16")} == {
        key: value for key, value in content.items() if key not in ("zero_optimization", "fp16")
    }
    assert merged["zero_optimization"] == {"reduce_bucket_size": 5, "stage": 0}
    assert merged["fp16"] == {"loss_scale_window": 500, "enabled": False}


def test_the_file_sets_what_no_flag_says(decide):
    content = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    plan = decide(content)
    assert (plan.batch.global_batch_size, plan.parallel.zero_stage) == (8, 2)


@pytest.mark.parametrize("size", [2, 8])
def test_with_a_ramp_the_first_and_the_final_size_are_accepted(decide, size):
    flags = ["--global-batch-size", "8", "--rampup-batch-size", "2", "2", "24"]
    flags += ["--train-samples", "100"]
    merged = decide({"train_batch_size": size}, *flags, without=("--train-iters",)).deepspeed
    assert merged["train_batch_size"] == 2
    assert merged["gradient_accumulation_steps"] == 1


def test_with_a_ramp_another_size_is_refused(decide):
    flags = ["--global-batch-size", "8", "--rampup-batch-size", "2", "2", "24"]
    with problem("train_batch_size … 4 … --global-batch-size … 2"):
        decide(
            {"train_batch_size": 4}, *flags, "--train-samples", "100", without=("--train-iters",)
        )


def test_bf16_sums_in_32_bits():
    merged = tiny_plan("--bf16").deepspeed
    assert merged["data_types"] == {"grad_accum_dtype": "fp32"}
    assert merged["communication_data_type"] == "fp32"


def test_bf16_sums_as_the_file_says(decide):
    merged = decide({"data_types": {"grad_accum_dtype": "bf16"}}, "--bf16").deepspeed
    assert merged["data_types"] == {"grad_accum_dtype": "bf16"}


def test_fp16_has_a_dynamic_loss_scale_as_far_as_the_file_is_silent(decide):
    content = {"fp16": {"enabled": True, "initial_scale_power": 12}}
    assert decide(content, "--fp16", device="cuda").deepspeed["fp16"] == {
        "enabled": True,
        "initial_scale_power": 12,
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    }


def test_the_flags_of_the_loss_scale_are_written(decide):
    flags = "--fp16 --loss-scale 1024 --initial-loss-scale 65536 --min-loss-scale 2"
    flags += " --loss-scale-window 500 --hysteresis 4"
    assert decide({}, *flags.split(), device="cuda").deepspeed["fp16"] == {
        "enabled": True,
        "loss_scale": 1024,
        "initial_scale_power": 16,
        "min_loss_scale": 2,
        "loss_scale_window": 500,
        "hysteresis": 4,
    }


@pytest.mark.parametrize(
    ("key", "value", "flag", "message"),
    [
        ("loss_scale", 0, "--loss-scale 1024", "loss_scale is 0, but --loss-scale is 1024.0"),
        (
            "initial_scale_power",
            12,
            "--initial-loss-scale 65536",
            "initial_scale_power is 12, but the power of --initial-loss-scale is 16",
        ),
        (
            "min_loss_scale",
            1,
            "--min-loss-scale 2",
            "min_loss_scale is 1, but --min-loss-scale is 2",
        ),
        (
            "loss_scale_window",
            500,
            "--loss-scale-window 9",
            "loss_scale_window is 500, but --loss-scale-window is 9",
        ),
        ("hysteresis", 2, "--hysteresis 3", "hysteresis is 2, but --hysteresis is 3"),
    ],
)
def test_a_loss_scale_that_the_file_contradicts_is_told(decide, key, value, flag, message):
    with problem(message):
        decide({"fp16": {key: value}}, "--fp16", *flag.split(), device="cuda")


SCALE_12 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 12}


def test_a_power_said_as_the_loss_scale_is_read_as_the_file_means_it(decide):
    plan = decide({"fp16": SCALE_12}, "--fp16", "--loss-scale", "12", device="cuda")
    assert plan.deepspeed["fp16"] == SCALE_12 | {"hysteresis": 2, "min_loss_scale": 1}
    assert (
        "--loss-scale 12 is read as fp16.initial_scale_power of the JSON: the loss scale is dynamic and "
        "starts at 4096"
    ) in plan.notices
    with problem("loss_scale … 0 … --loss-scale … 13.0"):
        decide({"fp16": SCALE_12}, "--fp16", "--loss-scale", "13", device="cuda")


def test_a_loss_scale_without_fp16_is_told_to_do_nothing():
    notices = tiny_plan("--bf16", "--zero-stage", "1", "--loss-scale", "12").notices
    assert notices == ("--loss-scale 12 has no effect: only --fp16 scales its loss",)


def test_fp16_sums_in_32_bits_when_asked_to(decide):
    flag = "--accumulate-allreduce-grads-in-fp32"
    merged = decide({}, "--fp16", flag, device="cuda").deepspeed
    assert merged["data_types"] == {"grad_accum_dtype": "fp32"}
    assert merged["communication_data_type"] == "fp32"
    assert "data_types" not in decide({}, "--fp16", device="cuda").deepspeed
    assert "data_types" not in decide({}, flag).deepspeed
    with problem('grad_accum_dtype is "bf16" … --accumulate-allreduce'):
        decide({"data_types": {"grad_accum_dtype": "bf16"}}, "--bf16", flag)


@pytest.mark.parametrize(
    ("flags", "block"),
    [
        ("--zero-reduce-scatter", {"reduce_scatter": True}),
        ("--zero-contigious-gradients", {"contiguous_gradients": True}),
        ("--zero-reduce-bucket-size 1_000", {"reduce_bucket_size": 1000}),
        ("--zero-allgather-bucket-size 1000", {"allgather_bucket_size": 1000}),
        ("--zero-reduce-bucket-size 0", {}),
        ("--cpu-optimizer", {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
        (
            "--zero-stage 3 --remote-device cpu --use-pin-memory",
            {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}
            | {"memory_efficient_linear": False},
        ),
        ("--use-distributed-optimizer", {"stage": 1}),
        ("--use-distributed-optimizer --zero-stage 2", {"stage": 2}),
    ],
)
def test_the_flags_of_zero_are_written(flags, block):
    assert tiny_plan(*flags.split()).deepspeed["zero_optimization"] == {"stage": 0} | block


@pytest.mark.parametrize(
    ("block", "flags", "message"),
    [
        ({"reduce_bucket_size": 5}, "--zero-reduce-bucket-size 6", "but --zero-reduce-bucket-s"),
        ({"reduce_scatter": False}, "--zero-reduce-scatter", "but --zero-reduce-scatter is True"),
        ({"offload_optimizer": {"device": "nvme"}}, "--cpu-optimizer", "but --cpu-optimizer is c"),
        ({"offload_param": {"device": "cpu"}}, "--remote-device none", "but --remote-device is n"),
    ],
)
def test_a_flag_of_zero_that_the_file_contradicts_is_told(decide, block, flags, message):
    with problem(message):
        decide({"zero_optimization": {"stage": 3} | block}, *flags.split())


@pytest.mark.parametrize(
    ("flags", "impl", "forces_its_own"),
    [
        ("--cpu-optimizer", "deepspeed", True),
        ("--cpu-optimizer --optimizer lion", "deepspeed", True),
        ("--cpu-optimizer --cpu_torch_adam", "torch", False),
        ("--cpu-optimizer --optimizer sgd", "torch", False),
        ("--cpu-optimizer --optimizer-impl torch", "torch", False),
    ],
)
def test_deepspeed_insists_on_its_own_optimizer_only_where_it_has_one(flags, impl, forces_its_own):
    plan = tiny_plan(*flags.split())
    assert (plan.optimizer.impl, plan.optimizer.on_cpu) == (impl, True)
    assert plan.deepspeed.get("zero_force_ds_cpu_optimizer", True) == forces_its_own


@pytest.mark.parametrize(
    ("flags", "stage"),
    [
        ("", 0),
        ("--zero-stage 3", 3),
        ("--bf16", 1),
        ("--bf16 --zero-stage 0", 1),
        ("--bf16 --zero-stage 2", 2),
    ],
)
def test_16_bit_training_runs_at_stage_1_at_least(flags, stage):
    plan = tiny_plan(*flags.split())
    assert (plan.parallel.zero_stage, plan.deepspeed["zero_optimization"]["stage"]) == (
        stage,
        stage,
    )


def test_a_raised_stage_is_said():
    assert tiny_plan("--bf16").notices == (
        "16-bit training at ZeRO stage 0 runs as stage 1: the same steps, with the optimizer "
        "state divided over the replicas",
    )
    assert tiny_plan("--bf16", "--zero-stage", "1").notices == ()


def test_a_file_that_says_stage_0_of_16_bit_training_is_fine(decide):
    content = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}
    assert decide(content, "--bf16").deepspeed["zero_optimization"]["stage"] == 1


def test_the_optimizer_of_the_file_is_left_out_and_said(decide):
    plan = decide({"optimizer": {"type": "Lion"}})
    assert "optimizer" not in plan.deepspeed
    assert plan.notices == (
        "the optimizer block of the DeepSpeed JSON is not used: --optimizer and its flags decide",
    )


def test_stage_3_keeps_its_linear_layers_exact():
    zero = tiny_plan("--zero-stage", "3").deepspeed["zero_optimization"]
    assert zero == {"stage": 3, "memory_efficient_linear": False}


def test_offload_needs_nothing_compiled(decide):
    content = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert decide(content).deepspeed["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in decide({}).deepspeed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "ds.json is not JSON: "),
        ('{"a": ' + "[" * 100_000, "ds.json: its values are nested too deeply"),
        ("[1]", "ds.json: expected an object at the top"),
        ('{"fp16": {}, "fp16": {}}', "ds.json: the key fp16 stands twice in one object"),
    ],
)
def test_what_is_no_object_is_refused(decide, text, message):
    with problem(message):
        decide(text)


def test_all_problems_of_a_file_are_told_at_once(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"foo": 1, "fp16": {"enabld": true}, "bf16": 1, "bf16": 2, "gradient_clipping": 0.5, '
        '"zero_optimization": {"stage": "3", "offload_param": {"device": "cpu"}}}'
    )
    with pytest.raises(ConfigError) as caught:
        tiny_plan("--deepspeed_config", str(file))
    named = (
        "the key bf16 stands twice",
        "foo: unknown key",
        "fp16.enabld",
        "stage is",
    )
    # An offload's device is not compared with a stage that could not be read.
    for part, line in zip((*named, "gradient_clipping is 0.5"), caught.value.problems, strict=True):
        assert part in line


@pytest.mark.parametrize(
    ("text", "flags", "named"),
    [
        (
            '{"zero_optimization": {"stage": 3, "overlap_com": true}}',
            "--remote-device cpu",
            ["zero_optimization.overlap_com: unknown key; did you mean overlap_comm?"],
        ),
        (
            '{"zero_optimization": {"stage": 3, "reduce_scatter": 1}}',
            "--remote-device cpu",
            ["zero_optimization.reduce_scatter is 1, expected bool"],
        ),
        (
            '{"zero_optimization": {"stge": 3, "offload_param": {"device": "cpu"}}}',
            "",
            ["zero_optimization.stge: unknown key; did you mean stage?"],
        ),
        (
            '{"zero_optimization": {"stage": 2, "stage": 3, "offload_param": {"device": "cpu"}}}',
            "",
            ["the key stage stands twice in one object"],
        ),
        (
            '{"gradient_clipping": 0.5, "gradient_clipping": 0.5}',
            "",
            ["the key gradient_clipping stands twice in one object"],
        ),
        (
            '{"aio": {"a": 1, "a": 2}, "pipeline": {"a": 1, "a": 2}}',
            "",
            ["the key a stands twice in one object"],
        ),
    ],
)
def test_a_wrong_key_is_the_one_problem(tmp_path, text, flags, named):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        tiny_plan("--deepspeed_config", str(file), *flags.split())
    assert [*caught.value.problems] == [f"--deepspeed_config {file}: {each}" for each in named]


def test_a_missing_file_is_told():
    with problem("--deepspeed_config nowhere: No such file or directory"):
        tiny_plan("--deepspeed_config", "nowhere")
