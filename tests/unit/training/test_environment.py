"""What started this process."""

import os

import pytest

from megatron.errors import ConfigError
from megatron.training.environment import (
    Launch,
    cpu_threads,
    export_determinism,
    export_launch,
    read_launch,
    verbosity,
)

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "DS_ACCELERATOR",
    "MEGATRON_DEEPSPEED_VERBOSITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The variables of launchers, all gone; what a test or the code sets is undone."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def test_without_a_launcher_it_is_alone():
    assert read_launch(None) == Launch(rank=0, world_size=1, local_rank=0, local_size=1)


def test_the_variables_of_torch_run_are_read(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert read_launch(None) == Launch(5, 8, 1, 4)


def test_the_variables_of_the_deepspeed_launcher_are_read(environment):
    environment(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_SIZE="4")
    assert read_launch(1) == Launch(5, 8, 1, 4)


def test_the_local_rank_may_come_by_flag_alone(environment):
    environment(RANK="5", WORLD_SIZE="8")
    assert read_launch(3).local_rank == 3


def test_an_empty_variable_says_nothing(environment):
    environment(RANK="", WORLD_SIZE="")
    assert read_launch(None) == Launch(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("variables", "local_rank", "message"),
    [
        ({"RANK": "8", "WORLD_SIZE": "8"}, None, "RANK=8 with WORLD_SIZE=8: ranks go from 0 to 7"),
        ({"RANK": "1"}, None, "RANK=1 with WORLD_SIZE=1: .* set both, or start through a launcher"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, None, "RANK=-1 with WORLD_SIZE=2"),
        ({"WORLD_SIZE": "0"}, None, "RANK=0 with WORLD_SIZE=0"),
        ({"RANK": "one"}, None, "environment variable RANK='one' is not a number"),
        ({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}, 0, "LOCAL_RANK=1 but --local_rank 0"),
        ({"WORLD_SIZE": "2"}, None, "WORLD_SIZE=2 .*RANK"),
    ],
)
def test_a_contradiction_is_told(environment, variables, local_rank, message):
    environment(**variables)
    with pytest.raises(ConfigError, match=message):
        read_launch(local_rank)


def test_libraries_are_told_what_a_launcher_did_not_say():
    export_launch(Launch(0, 1, 0, 1), "cpu")
    told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    assert told == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert (os.environ["DS_ACCELERATOR"], os.environ["MASTER_ADDR"]) == ("cpu", "127.0.0.1")
    assert 1024 <= int(os.environ["MASTER_PORT"]) < 65536


def test_the_address_of_the_launcher_is_kept(environment):
    environment(MASTER_ADDR="node0", MASTER_PORT="6000")
    for world_size in (1, 4):
        export_launch(Launch(0, world_size, 0, 1), "cuda")
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node0", "6000")


def test_sequence_parallelism_on_gpus_has_one_queue(environment, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    export_launch(Launch(0, 1, 0, 1), "cuda")
    export_launch(Launch(0, 1, 0, 1), "cpu", sequence_parallel=True)
    with pytest.raises(ConfigError, match="CUDA_DEVICE_MAX_CONNECTIONS=32 with --sequence-par"):
        export_launch(Launch(0, 1, 0, 1), "cuda", sequence_parallel=True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    export_launch(Launch(0, 1, 0, 1), "cuda", sequence_parallel=True)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_several_processes_need_a_port():
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 but MASTER_PORT is not set: start through"):
        export_launch(Launch(0, 2, 0, 2), "cpu")


def test_processes_of_a_node_share_its_cores(environment, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    assert [cpu_threads(Launch(0, n, 0, n)) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    environment(OMP_NUM_THREADS="3")
    assert cpu_threads(Launch(0, 2, 0, 2)) == 3


def test_how_much_is_said_can_come_from_the_environment(environment):
    assert verbosity() is None
    environment(MEGATRON_DEEPSPEED_VERBOSITY="Debug")
    assert verbosity() == "debug"
    environment(MEGATRON_DEEPSPEED_VERBOSITY="loud")
    with pytest.raises(ConfigError, match="='loud' is none of debug, info, warning"):
        verbosity()


def test_determinism_is_told_to_the_libraries_and_what_contradicts_it_refused(environment):
    export_determinism()
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")
    environment(CUBLAS_WORKSPACE_CONFIG=":16:8", NCCL_ALGO="CollnetChain,Ring")
    export_determinism()
    assert os.environ["NCCL_ALGO"] == "CollnetChain,Ring"
    environment(NCCL_ALGO="Ring,Tree")
    with pytest.raises(ConfigError, match="NCCL_ALGO=Ring,Tree lets results differ"):
        export_determinism()
