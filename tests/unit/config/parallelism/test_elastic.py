"""The number of replicas that --elastic chooses for the processes that there are."""

import json

import pytest
from problems import problem
from tiny import tiny_config, tiny_plan

from megatron.common.errors import ConfigError
from megatron.config.plan.validation import validate
from megatron.data.sampling.batch_sampler import micro_batches


def size_of(line, started, **words):
    config = tiny_config("--micro-batch-size", "1", "--elastic", *line.split())
    return validate(config, world_size=started, device="cpu", **words).world_size


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        # Of 5 replicas a batch of 12 is no multiple, of 4 it is.
        ("--global-batch-size 12", {1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 6: 6, 11: 6, 12: 12, 99: 12}),
        ("--global-batch-size 12 --micro-batch-size 3", {3: 2, 4: 4, 9: 4}),
        # Replicas of 2 processes.
        ("--global-batch-size 12 --tensor-model-parallel-size 2", {3: 2, 7: 6, 11: 8, 12: 12}),
        ("--global-batch-size 12 --pipeline-model-parallel-size 2 --zero-stage 1", {5: 4, 11: 8}),
        # Every size on the way must be a multiple, too.
        (
            "--global-batch-size 12 --rampup-batch-size 8 4 100 --train-samples 120",
            {3: 2, 5: 4, 99: 4},
        ),
        # The interleaved schedule takes multiples of two micro-batches.
        (
            "--global-batch-size 12 --num-layers 4 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 2",
            {4: 4, 8: 6, 24: 12},
        ),
        # Replicas that divide experts.
        (
            "--global-batch-size 12 --num-experts 4 --moe-expert-parallel-size 2",
            {2: 2, 3: 2, 5: 4, 99: 12},
        ),
        ("--global-batch-size 7", {6: 1, 7: 7, 8: 7}),
        ("--global-batch-size 7 --world-size 6", {6: 1}),
    ],
)
def test_the_most_replicas_train_that_divide_every_batch(line, sizes):
    words = ["--train-iters"] if "--train-samples" in line else []
    for started, size in sizes.items():
        config = tiny_config("--micro-batch-size", "1", "--elastic", *line.split(), without=words)
        assert validate(config, world_size=started, device="cpu").world_size == size, started


def test_the_jsons_accumulation_decides_the_number_of_replicas(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_accumulation_steps": 6, "train_batch_size": 12}))
    assert size_of(f"--deepspeed_config {file} --global-batch-size 12", 4) == 2


@pytest.mark.parametrize(
    ("line", "started", "message"),
    [
        ("", 2, "--elastic needs --global-batch-size"),
        ("--global-batch-size 4 --world-size 3", 2, "--world-size 3, but the launcher has started"),
        (
            "--global-batch-size 4 --tensor-model-parallel-size 2",
            1,
            "a multiple of 2 processes, got 1",
        ),
        ("--global-batch-size 5 --micro-batch-size 2", 2, "5 is not a multiple of --micro-batch-s"),
        (
            "--global-batch-size 4 --num-experts 2 --moe-expert-parallel-size 2",
            1,
            "--moe-expert-parallel-size 2 does not divide the 1 replicas",
        ),
        ("--global-batch-size 4 --use-bnb-optimizer", 2, "does not work with --use-bnb-optimizer"),
    ],
)
def test_what_no_number_of_replicas_can_mend_is_an_error(line, started, message):
    with pytest.raises(ConfigError) as error:
        size_of(line, started)
    assert message in str(error.value)


def test_without_it_another_number_of_processes_is_an_error_that_names_it():
    line = ["--micro-batch-size", "1", "--global-batch-size", "12"]
    with problem("5 replicas = 5 … --elastic"):
        validate(tiny_config(*line), world_size=5, device="cpu")


def test_every_number_of_replicas_reads_the_same_samples_in_a_step():
    class Numbers:
        def __len__(self):
            return 100

        def __getitem__(self, i):
            return {"tokens": i}

    orders = []
    for started in (1, 2, 3, 4, 5, 6):
        config = tiny_config("--micro-batch-size", "1", "--global-batch-size", "12", "--elastic")
        data = validate(config, world_size=started, device="cpu").world_size
        batch = tiny_plan(
            *["--micro-batch-size", "1", "--global-batch-size", "12"], world_size=data
        )
        ranks = [
            micro_batches(
                Numbers(), consumed_samples=24, micro_batch_size=1, data_rank=rank, data_size=data
            )
            for rank in range(data)
        ]
        turns = batch.batch.num_micro_batches(12)
        orders.append([int(next(rank)["tokens"][0]) for _ in range(turns) for rank in ranks])
    assert orders == [[*range(24, 36)]] * 6
