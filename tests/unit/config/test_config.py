"""The complete Config."""

from dataclasses import FrozenInstanceError, asdict

import pytest
from problems import problem
from tiny import tiny_argv, tiny_config

from megatron.common.errors import ConfigError
from megatron.config import config as config_module
from megatron.config.config import (
    ANY_NETWORK,
    SECTIONS,
    Config,
    parse_config,
    parse_config_for_checkpoint,
    words_of,
)
from megatron.config.inference.generation import GenerationConfig


def test_the_sections_are_those_of_the_config():
    assert {*SECTIONS, "extensions"} == set(asdict(tiny_config()))


def test_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        tiny_config().model.num_layers = 3


def test_a_command_line_of_the_field_is_read_whole():
    config, notices = parse_config(
        tiny_argv(
            *("--model-parallel-size", "2"),
            *("--DDP-impl", "torch"),
            *("--num-workers", "2"),
            *("--distributed-backend", "nccl"),
            *("--vocab", "vocab.json"),
            *("--no-log-learnig-rate-to-tensorboard", "--local_rank=3"),
            *("--deepspeed", "--use-deepspeed", "--deepspeed-activation-checkpointing"),
        )
    )
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.distributed_backend == "nccl"
    assert config.parallel.local_rank == 3
    assert config.tokenizer.vocab_file == "vocab.json"
    assert config.logging.log_learning_rate_to_tensorboard is False
    named = [name for notice in notices for name in notice.partition(":")[0].split(", ")]
    assert named == [
        "--DDP-impl",
        "--num-workers",
        "--deepspeed",
        "--use-deepspeed",
        "--deepspeed-activation-checkpointing",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-seq-length", "4"], "--max-seq-length: write --seq-length instead"),
        (["--num-experts-switch", "2"], "--num-experts-switch: write --num-experts instead"),
        (["--optimizer", "lamb"], "--optimizer lamb: unknown optimizer"),
        (["--data-impl", "hdf5"], "argument --data-impl: invalid choice: 'hdf5'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(flags, message):
    with problem(message):
        tiny_config(*flags)


def test_a_tool_takes_the_rest_from_the_checkpoint(caplog):
    saved = asdict(tiny_config("--bf16", "--no-log-loss-scale-to-tensorboard", "--seed", "5"))
    config, own = parse_config_for_checkpoint(
        ["--load", "runs", "--seed", "6", "--top_k", "3", "--use-deepspeed"],
        saved,
        {"generation": GenerationConfig},
    )
    expected = {**saved, "training": saved["training"] | {"seed": 6}}
    expected["checkpoint"] = saved["checkpoint"] | {"load": "runs"}
    assert asdict(config) == expected
    assert own["generation"] == GenerationConfig(top_k=3)
    assert [notice.partition(":")[0] for notice in caplog.messages] == ["--use-deepspeed"]


def test_a_config_of_values_equals_that_of_their_flags():
    config = tiny_config("--bf16", "--no-log-loss-scale-to-tensorboard", "--seed", "5")
    sections = asdict(config)
    assert Config.of(**{name: values for name, values in sections.items() if values}) == config
    tiny = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
    made = Config.of(model=tiny, lr=1e-4, micro_batch_size=1, parallel={"device": "cpu"})
    assert (made.model.num_layers, made.schedule.lr, made.parallel.device) == (2, 1e-4, "cpu")
    assert made.training.seed == config_module.TrainingConfig.seed


def test_values_that_make_no_config_are_refused():
    with pytest.raises(ConfigError) as refused:
        Config.of(modle={}, model={"num_layer": 2, "lr": 1})
    assert refused.value.problems == (
        "there is no section modle; did you mean model?",
        "section model has no field num_layer; did you mean num_layers?",
        "section model has no field lr",
    )
    with problem("--num-layers … : invalid int value: '2.5'"):
        Config.of(**{**ANY_NETWORK, "model": {**ANY_NETWORK["model"], "num_layers": 2.5}})
    with problem("are required: … --micro-batch-size"):
        Config.of(**ANY_NETWORK)


def test_values_become_the_flags_that_users_type():
    values = {"model": {"num_layers": 2, "swiglu": True, "kv_channels": None}, "lr": 1e-4}
    assert words_of(values) == ["--num-layers=2", "--swiglu", "--lr=0.0001"]
    assert words_of({"rope_truncation": False, "bf16": False}) == ["--no-rope-truncation"]
    assert words_of({"data_path": ["0.5", "a"]}) == ["--data-path", "0.5", "a"]
