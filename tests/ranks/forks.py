"""Processes that cost a fork each: of a server that has imported what every training process needs.

To import torch and DeepSpeed takes a process seconds, and what most tests prove takes less.
"""

import gc
import multiprocessing
import os
import random
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_PRELOADED = [
    "megatron.training.entry",
    "megatron.training.pretrain",
    "megatron.inference.loading.text_generator",
    "megatron.objectives.gpt",
    "megatron.data.datasets.gpt_dataset",
    "megatron.tokenizer.types.gpt2",
    "gigatoken",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.triton_ops",
    "transformers.modeling_utils",
    "torch._dynamo",
    "torch._inductor.compile_fx",  # ZeRO imports it
    "torch.utils.tensorboard",
    "pytest",
    "forks",
]
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_TESTS = str(Path(__file__).parents[1])
# Processes look after each other when one starts: two threads would read the same exit code.
_lock = threading.Lock()


def server() -> Any:
    """Return the context of `multiprocessing` whose processes are forks of the server."""
    context = multiprocessing.get_context("forkserver")
    kept = {name: os.environ.get(name) for name in (*_ENVIRONMENT, "PYTHONPATH")}
    os.environ.update(_ENVIRONMENT, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    context.set_forkserver_preload(_PRELOADED)
    forkserver.ensure_running()
    for name, value in kept.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return context


def exit_codes(
    function: Callable[..., None],
    calls: Sequence[Sequence[Any]],
    *,
    timeout_s: float,
    while_open: Any = None,
) -> list[int | None]:
    """Call `function` with each of `calls` in a fork of its own; return how each has ended.

    Args:
        timeout_s: how long each may take; None stands for one that had to be killed.
        while_open: a connection; when its other side closes it, the forks are killed.
    """
    with _lock:
        processes = [server().Process(target=function, args=tuple(words)) for words in calls]
        for process in processes:
            process.start()
    try:
        for process in processes:
            wait([process.sentinel, *filter(None, [while_open])], timeout_s)
        with _lock:
            return [process.exitcode for process in processes]
    finally:
        with _lock:
            for process in processes:
                process.kill()
                process.join()


class Descriptor:
    """An open file that goes with a call to a fork, where its number may be another."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> Descriptor:
    return Descriptor(sent.detach())


def become_own_process(environment: Mapping[str, str]) -> None:
    """Give a fork of the server what a process that was started has of its own.

    Args:
        environment: its variables; it sees no GPU all the same.
    """
    import numpy
    import torch

    # What the server imported stays: looking through it for garbage takes longer than a job.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    # Not the server's: a seed that a run forgets must show.
    random.seed()
    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(1)


def run_script(
    words: Sequence[str], environment: Mapping[str, str], folder: str, *streams: Descriptor
) -> None:
    """Do what `python words...` does, in a fork of the server.

    Args:
        folder: the working directory.
        streams: standard input, output, and what takes errors.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream.number, number)
    for number in {stream.number for stream in streams}:
        os.close(number)
    # The server has none to read from.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    become_own_process(environment)
    os.chdir(folder)
    named = [
        os.path.abspath(place) for place in environment.get("PYTHONPATH", "").split(":") if place
    ]
    elsewhere = [*named, *(place for place in sys.path if not place.startswith(_TESTS))]
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path[:] = [folder, *elsewhere]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-":
        sys.argv = list(words)
        sys.path[:] = [folder, *elsewhere]
        exec(compile(sys.stdin.read(), "<stdin>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(words)
        sys.path[:] = [str(Path(words[0]).resolve().parent), *elsewhere]
        runpy.run_path(words[0], run_name="__main__")
