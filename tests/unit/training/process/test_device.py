"""Which device a process computes on."""

import os

import pytest
import torch
from problems import problem
from tiny import tiny_config
from training_here import train_here

from megatron.common.errors import ConfigError, ExitCode
from megatron.objectives.gpt import GPT
from megatron.training import pretrain, setup
from megatron.training.process.device import choose_device, prepare_process
from megatron.training.process.environment import Launch
from megatron.training.setup import require_own_device, start_processes


def place(local_rank):
    return Launch(local_rank, 4, local_rank, 4)


@pytest.mark.parametrize(
    ("requested", "count", "chosen"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 0, "cpu"),
        ("cpu", 8, "cpu"),
        ("auto", 8, "cuda:3"),
        ("cuda", 4, "cuda:3"),
    ],
)
def test_the_device_follows_from_the_flag_and_the_machine(gpus, requested, count, chosen):
    gpus(count)
    assert choose_device(requested, place(3)) == torch.device(chosen)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("12.8", "2 NVIDIA GPUs … driver (450) … CUDA 12.8"),
        (None, "2 NVIDIA GPUs (driver 450) … CPUs … CUDA"),
    ],
)
def test_gpus_that_pytorch_cannot_use_are_no_reason_to_train_on_cpus(
    gpus, monkeypatch, build, message
):
    gpus(0, nodes=2, driver="450", build=build)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with problem(message) as refused:
        choose_device("auto", place(0))
    assert "--device cpu" in str(refused.value)
    assert refused.value.exit_code == ExitCode.MISUSED
    assert choose_device("cpu", place(0)) == torch.device("cpu")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto", place(0)) == torch.device("cpu")


def test_a_gpu_that_is_not_there_is_told(gpus):
    gpus(0)
    with problem("--device cuda: … --device cpu"):
        choose_device("cuda", place(0))


@pytest.mark.parametrize("requested", ["auto", "cuda"])
def test_too_few_gpus_are_told(gpus, requested):
    gpus(2)
    assert choose_device(requested, place(1)) == torch.device("cuda", 1)
    with problem("4 processes … 2 visible GPUs"):
        choose_device(requested, place(2))


def test_a_gpu_of_its_own_is_the_first(gpus):
    """Schedulers may show each process the one that it was given."""
    gpus(1)
    assert choose_device("auto", place(3)) == torch.device("cuda", 0)


def test_a_single_gpu_is_one_process_s(gpus, group):
    gpus(1, uuid="GPU-1")
    require_own_device(torch.device("cuda", 0), Launch(0, 1, 0, 1))
    require_own_device(torch.device("cuda", 0), place(0))
    with problem("4 processes … 1 GPU … the same"):
        require_own_device(torch.device("cuda", 0), place(1))


def test_what_nccl_says_of_a_shared_gpu_is_told_in_words(gpus, monkeypatch):
    def start(backend, level, **options):
        raise RuntimeError(output)

    monkeypatch.setattr("megatron.engine.deepspeed.distributed.start", start)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    output = "Last error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    device = torch.device("cuda", 0)
    with problem("4 processes … the same"):
        start_processes(tiny_config(), place(1), device)
    output = "connection refused"
    with pytest.raises(RuntimeError, match="connection refused"):
        start_processes(tiny_config(), place(1), device)


@pytest.fixture
def any_algorithm():
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_kernels_are_chosen_on_the_process_s_own_gpu(gpus, monkeypatch, any_algorithm):
    """Their trial launch goes to the current device, and PyTorch's offer depends on determinism."""
    gpus(4)

    def choose(plan, device):
        assert torch.cuda.current_device() == device == torch.device("cuda", 3)
        assert torch.are_deterministic_algorithms_enabled()
        raise ConfigError("enough")

    monkeypatch.setattr(setup, "choose", choose)
    monkeypatch.setattr(pretrain, "_meet_others", lambda *_: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flags = ("--deterministic-mode", "--tokenizer-type", "NullTokenizer", "--vocab-size", "10")
    with problem("enough"):
        train_here(tiny_config(*flags), place(3), torch.device("cuda", 3), GPT())


def test_the_process_and_the_libraries_agree(gpus, monkeypatch):
    gpus(0)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    launch, device = prepare_process(tiny_config().parallel)
    assert (launch, device.type) == (Launch(0, 1, 0, 1), "cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize(
    "flag",
    ["--tensor-model-parallel-size", "--context-parallel-size", "--ds-sequence-parallel-size"],
)
def test_gpus_that_share_layers_or_samples_have_one_queue(gpus, monkeypatch, flag):
    for name in ("RANK", "LOCAL_RANK", "DS_ACCELERATOR", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "4")

    def queues(*flags, given=None, capability=(9, 0), device="cuda"):
        gpus(4, capability)
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given or "")
        if given is None:
            monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
        prepare_process(tiny_config(*flags, "--device", device).parallel)
        return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")

    assert queues() is None
    assert queues(given="32") == "32"
    assert queues(flag, "2", device="cpu") is None
    assert queues(flag, "2") == "1"
    assert queues(flag, "2", given="1") == "1"
    assert queues(flag, "2", given="32", capability=(10, 0)) == "32"
    with problem(f"CUDA_DEVICE_MAX_CONNECTIONS=32 … {flag} 2"):
        queues(flag, "2", given="32")
