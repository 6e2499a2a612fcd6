"""What all tests share; tests/ itself is on the import path because this file is in it."""

import gc
import io
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from shutil import disk_usage
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from shared_groups import open_groups

from megatron.common.host_memory import available_bytes
from megatron.tensor_parallel.process_groups import lone_group

# Tensors here are tiny; more threads would only wait for each other, also in processes of tests and
# where a model is loaded.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Tests write little, and flush it: in memory they do not wait for a disk. There tmp_path stays only
# if its test fails (see pyproject.toml).
with suppress(OSError):
    if disk_usage("/dev/shm").free >= 4 << 30 and available_bytes() >= 8 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Shells have background jobs ignore these, and children inherit that; tests of signals mean those of
# a job in the foreground.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# The same code gets the same answer: examples are those of a test's source, until others are requested
# for by `pytest --hypothesis-profile=default`. How long one takes says nothing on a machine that
# does other work too.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what is imported out of searches for garbage, which take longer than most tests.

    While tests are collected there is none.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Variables that a module's tests leave behind would tell the next one's jobs a rank."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def log_handlers():
    """A command that a test calls logs to the stdout of that test, which is closed afterwards."""
    logger = logging.getLogger("megatron")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture(autouse=True)
def import_path():
    """Scripts add folders of theirs, where others would find modules of the same names."""
    before = sys.path[:]
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def draws():
    """A test draws the same whichever tests its process ran before, which differs with their pace.

    It also rounds the same: loading a model sets the number of threads, on which the order depends
    in which gradients are summed.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)  # also for what the next module prepares


@pytest.fixture(autouse=True)
def threads():
    """Each process group holds three threads; a test's own end with it, lest thousands gather.

    Those stay that DeepSpeed keeps for its next engine.
    """
    before = set(open_groups())
    yield
    deepspeed = sys.modules.get("deepspeed.utils.groups")
    kept = list(vars(deepspeed).values()) if deepspeed else []
    kept += [one for several in kept if isinstance(several, dict) for one in several.values()]
    for made in (
        set(open_groups()) - before - {one for one in kept if isinstance(one, dist.ProcessGroup)}
    ):
        dist.destroy_process_group(made)


@pytest.fixture(scope="session")
def group():
    """A process group of this process alone."""
    yield lone_group()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def store():
    """An S3 server of the module's own, and the proxy before it; see `object_store`."""
    from object_store import object_store

    with object_store() as running:
        yield running


@pytest.fixture
def stdin(monkeypatch):
    """Return a function that makes a file, or a content, the standard input of this process."""
    opened = []

    def read_from(content: Path | bytes | str):
        if isinstance(content, Path):
            raw = content.open("rb")
        else:
            raw = io.BufferedReader(
                io.BytesIO(content if isinstance(content, bytes) else content.encode())
            )
        opened.append(io.TextIOWrapper(raw))
        monkeypatch.setattr(sys, "stdin", opened[-1])

    yield read_from
    for file in opened:
        file.close()


@pytest.fixture
def modules(monkeypatch):
    """Return a function that puts a module of these attributes in the place of an installed one.

    Without attributes it is as if the package were not installed.
    """

    def put(name, **attributes):
        if not attributes:
            monkeypatch.setitem(sys.modules, name, None)
            return None
        for above in accumulate(name.split(".")[:-1], "{}.{}".format):
            if find_spec(above) is None:
                put(above, __path__=[])
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


@pytest.fixture
def os_calls(monkeypatch):
    """Return a function that records the paths on which a function of `os`, or of `io`, is called.

    Where a path ends in `on`, the call raises `error`: an exception, or its number.
    """

    def watch(name, error=None, on="", module=os):
        usual, paths = getattr(module, name), []

        def call(at, *args, **named):
            path = os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else os.fspath(at)
            paths.append(path)
            if error is not None and path.endswith(on):
                raise OSError(error, os.strerror(error), path) if isinstance(error, int) else error
            return usual(at, *args, **named)

        monkeypatch.setattr(module, name, call)
        return paths

    return watch


@pytest.fixture
def clock(monkeypatch):
    """The host's clocks, which stand still but for `clock.pass_time` and for pauses."""
    now = SimpleNamespace(s=100.0, pauses=[])

    def pass_time(seconds):
        now.s += seconds

    def sleep(seconds):
        pass_time(seconds)
        now.pauses.append(seconds)

    now.pass_time = pass_time
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now.s)
    monkeypatch.setattr(time, "sleep", sleep)
    return now


@pytest.fixture
def gpus(monkeypatch):
    """Return a function that gives this process GPUs, on which nothing can be computed.

    Args:
        nodes: GPUs of the machine, which PyTorch may not see.
        build: version of CUDA that PyTorch was built for.
        board: the properties of each GPU.
    """

    def pretend(count, capability=(9, 0), nodes=None, driver="", build="12.8", **board):
        current = [0]
        answers = {
            "torch.cuda.is_available": count > 0,
            "torch.cuda.is_initialized": count > 0,
            "torch.cuda.device_count": count,
            "torch.cuda.get_device_capability": capability,
            "torch.cuda.get_device_properties": SimpleNamespace(**board),
            "megatron.training.process.device.num_nvidia_devices": nodes or count,
            "megatron.training.process.device.driver": driver,
        }
        replaced = {name: lambda *_, answer=answer: answer for name, answer in answers.items()} | {
            "torch.cuda.current_device": lambda: current[0],
            "torch.cuda.set_device": lambda device: current.__setitem__(0, device),
            "torch.version.cuda": build,
        }
        for name, stand_in in replaced.items():
            monkeypatch.setattr(name, stand_in)

    return pretend


@pytest.fixture
def command_line(monkeypatch):
    """Return a function that starts this process with other words, as far as it can see.

    Args:
        typed: those given to Python, unless they are the same.
    """

    def start(*words, typed=None):
        for name, value in (("argv", words), ("orig_argv", ("python", *(typed or words)))):
            monkeypatch.setattr(sys, name, [str(word) for word in value])

    return start


@pytest.fixture
def unrecorded_packages(monkeypatch):
    """Leave installed packages out of results of lm_eval: each time a process of pip lists them."""
    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda *_: ("pip", ""))


@pytest.fixture
def repeats(monkeypatch):
    """Return a function that sets how failed requests to URLs are repeated."""

    def set_limits(**limits):
        for name, value in limits.items():
            monkeypatch.setattr(f"megatron.common.remote_files.{name.upper()}", value)

    return set_limits


@pytest.fixture
def disk(monkeypatch):
    """Return a function that sets the free bytes and files of all disks."""

    def fill(free=1000 * 4096, total=10**12, block=4096, files=10, free_files=5):
        numbers = {"f_frsize": block, "f_bavail": free // block, "f_bfree": free // block}
        numbers |= {"f_blocks": total // block, "f_files": files, "f_favail": free_files}
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**numbers))

    return fill


@pytest.fixture
def free_memory(monkeypatch):
    """Return a function that sets the free bytes of the host, or of this process's group."""

    def leave(free):
        for module in ("training.telemetry.forecast", "data.sampling.index_size"):
            monkeypatch.setattr(f"megatron.{module}.available_bytes", lambda: free)

    return leave
