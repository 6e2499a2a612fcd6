"""Training runs inside this process, and everything that can be observed from outside.

A run is `pretrain` itself on a command line; see `stood_in.py` for what it cannot do here.
"""

import io
import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from engines import deepspeed_of
from stood_in import stood_in
from torch import Tensor
from training_here import train_here

from megatron.checkpointing.train_state import TrainState
from megatron.common import logging as log
from megatron.common.errors import MegatronError
from megatron.common.registry import OBJECTIVES
from megatron.config.config import parse_config
from megatron.training import run
from megatron.training.loop.loop import Hook, StepResult
from megatron.training.process.device import prepare_process

Observation = dict[str, Any]
"""What was seen of a run, by aspect."""

ASPECTS = {
    "losses": "of the steps",
    "norms": "of the steps' gradients, before they are clipped",
    "rates": "learning rate of the steps",
    "sizes": "samples and tokens per sample of the steps, and when the run ended",
    "scales": "loss scale of the steps, and which were skipped",
    "measures": "names of what is measured of a step",
    "batches": "tokens, positions, labels and weights that each micro-batch holds",
    "shapes": "names and shapes of the weights",
    "weights": "sums of the weights behind the last step",
    "trained": "which weights have moved",
    "state": "type of the optimizer, and shapes and places of its state",
    "kept": "bytes for the backward pass, at most at once",
    "attention": "calls of PyTorch's kernel for it",
    "saved": "keys, tensors and numbers in the files of weights and optimizer",
    "deepspeed": "the settings that DeepSpeed is given",
    "log": "lines of the log, without times",
    "messages": "messages at the levels that are listened to, DeepSpeed's and printed ones too",
    "files": "that the run leaves",
    "scalars": "tags, places and values in TensorBoard's files, times left out",
    "writers": "what packages that draw curves and measure energy are given",
    "process": "settings of the process",
    "error": "the message that the run ends with",
}
"""What there is to see, and of what."""

_TIMES = (
    (
        re.compile(
            r"(per iteration \(ms\)|samples per second|TFLOPs|ETA|resident|\(kWh\)|CO2 \(kg\)|"
            r"\(GiB\)|MFU|HFU|slowest rank|times the median): [^|]+"
        ),
        r"\1",
    ),
    (re.compile(r"(datetime|\(sec(?:onds)?\)): .*"), r"\1"),
    (re.compile(r"(?<=: )\d+\.\d\d(?= \||$)"), "T"),
    (re.compile(r"\d+\.\d+ s\b|\d+\.\d+ ms\b"), "T"),
    (re.compile(r"after \d+\.\d+ minutes"), "after T minutes"),
    (re.compile(r"(?<=measured of the process: )\d+\.\d"), "M"),
    (re.compile(r"\d{4}-\d\d-\d\d[T_ ][\d:-]+"), "DATE"),
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_TIMED_TAGS = ("time", "throughput", "second", "flops", "memory")


def observe(
    argv: Sequence[str],
    folder: Path,
    *,
    objective: str = "gpt",
    as_gpu: bool = False,
    parts: bool = False,
) -> Observation:
    """Train what `argv` says and return what is seen of it on this rank.

    Args:
        folder: the run's own, that is empty; "{run}" in `argv` stands for it.
        as_gpu: whether the plan is made for a GPU, so that fp16 is allowed.
        parts: whether a weight of rank 1 changes behind the first step, as if it were damaged.

    Communication: every rank must call this, in step.
    """
    seen: Observation = {name: [] for name in ASPECTS}
    words = [word.replace("{run}", str(folder)) for word in argv]
    with ExitStack() as stack:
        for watch in (
            _messages,
            _deepspeed,
            partial(_steps, parts=parts, signalled="--exit-signal-handler" in words),
            partial(_packages, folder=folder),
            _process,
            _attention,
        ):
            stack.enter_context(watch(seen))
        stack.enter_context(stood_in(as_gpu=as_gpu))
        try:
            config, notices = parse_config(words, objective=objective)
            launch, device = prepare_process(config.parallel)
            log.configure(launch.rank)
            train_here(config, launch, device, OBJECTIVES.get(objective)(), notices=notices)
        except MegatronError as error:
            seen["error"] = str(error)
        except Exception:
            # One that is no refusal; on several ranks the others may wait for this one forever.
            if dist.get_world_size() > 1:
                raise
            seen["error"] = traceback.format_exc()
        seen["process"] = {
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "level": logging.getLogger("megatron").level,
            "level of DeepSpeed": deepspeed_logger.level,
            "calls of DeepSpeed": seen["process"],
        }
    dist.barrier()
    seen["files"] = sorted(_name(file, folder) for file in folder.rglob("*") if file.is_file())
    seen["saved"] = [
        _content(torch.load(f, weights_only=False)) for f in sorted(folder.rglob("*.pt"))
    ]
    seen["scalars"] = _scalars(folder)
    text = json.dumps(seen, default=str).replace(str(folder), "{run}")
    # A NaN is unequal to itself; its name is not.
    return json.loads(text, parse_constant=str)


def _name(file: Path, folder: Path) -> str:
    name = re.sub(r"tfevents\.\d+.*", "tfevents", str(file.relative_to(folder)))
    return re.sub(r"\d{4}-\d\d-\d\d[T_ ][\d:-]+", "DATE", name)


def _content(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return list(tree.shape)
    if isinstance(tree, Mapping):
        return {str(name): _content(part) for name, part in tree.items()}
    return [_content(part) for part in tree] if isinstance(tree, list | tuple) else None


class _Recorder(Hook):
    """Notes what every step did."""

    def __init__(self, seen: Observation, *, signalled: bool):
        self._seen, self._signalled = seen, signalled

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Note the step; behind the first, send the signal that is to be seen."""
        seen = self._seen
        if state.iteration == 1 and self._signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        seen["losses"].append(step.loss)
        seen["norms"].append(step.grad_norm)
        seen["rates"].append(step.lr)
        seen["sizes"].append((state.iteration, state.samples, step.batch_size, step.seq_length))
        seen["scales"].append((step.loss_scale, step.skipped))
        seen["measures"].append(sorted(step.measures))


class _Damage(Hook):
    """Changes a weight behind the first step."""

    def __init__(self, weight: Tensor):
        self._weight = weight

    def after_step(self, state: TrainState, step: StepResult) -> None:
        """Change it."""
        if state.iteration == 1:
            self._weight.data += 1


def _without_times(line: str) -> str:
    for pattern, instead in _TIMES:
        line = pattern.sub(instead, line)
    return line


class _Kept:
    """Counts the bytes that backward passes still need; `most` of them at once."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def pack(self, tensor: Tensor) -> "_Held":
        """Count `tensor` until it is freed."""
        return _Held(tensor, self)


class _Held:
    def __init__(self, tensor: Tensor, kept: _Kept):
        self.tensor, self._kept = tensor, kept
        self._bytes = tensor.nelement() * tensor.element_size()
        kept.now += self._bytes
        kept.most = max(kept.most, kept.now)

    def __del__(self) -> None:
        self._kept.now -= self._bytes


@contextmanager
def _steps(seen: Observation, *, parts: bool, signalled: bool) -> Iterator[None]:
    """Look at what passes through the loop."""
    train = run.train

    def watched(engine: Any, batches: Iterator[Any], **words: Any) -> str:
        named = dict(engine.module.named_parameters())
        seen["shapes"] = {
            name: (list(getattr(p, "ds_shape", p.shape)), str(p.dtype)) for name, p in named.items()
        }
        before = {name: _sum(p) for name, p in named.items()}
        words["hooks"] = [*words["hooks"], _Recorder(seen, signalled=signalled)]
        if parts and dist.get_rank() == 1:
            words["hooks"].append(_Damage(next(iter(named.values()))))
        kept = _Kept()
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.tensor):
            reason = train(engine, _noted(batches, seen["batches"]), **words)
        seen["kept"] = kept.most
        after = {name: _sum(p) for name, p in named.items()}
        seen["weights"] = after
        seen["trained"] = sorted(name for name in named if after[name] != before[name])
        seen["state"] = _state_of(engine)
        return reason

    with patch.object(run, "train", watched):
        yield


def _sum(parameter: Tensor) -> float:
    return parameter.detach().double().abs().sum().item()


def _noted(batches: Iterator[Any], into: list[Any]) -> Iterator[Any]:
    for batch in batches:
        into.append(_as_lists(batch))
        yield batch


def _as_lists(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.tolist()
    if isinstance(tree, Mapping):
        return {name: _as_lists(part) for name, part in tree.items()}
    return [_as_lists(part) for part in tree]


def _state_of(engine: Any) -> Any:
    wrapped = deepspeed_of(engine).optimizer
    basic = deepspeed_of(engine).basic_optimizer
    tensors = [
        (name, list(value.shape), str(value.dtype), value.is_pinned())
        for state in basic.state.values()
        for name, value in state.items()
        if torch.is_tensor(value)
    ]
    return type(wrapped).__name__, type(basic).__name__, tensors


@contextmanager
def _messages(seen: Observation) -> Iterator[None]:
    """Listen to what is logged at the levels in force."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            line = _without_times(record.getMessage())
            seen["messages"].append((record.levelname, record.name, line))
            if record.name.startswith("megatron"):
                seen["log"].append(line)

    configure, listener = log.configure, Listener()

    def configured(rank: int) -> None:
        configure(rank)
        logging.getLogger("megatron").handlers[:] = [listener]

    theirs = deepspeed_logger.handlers[:]
    deepspeed_logger.handlers[:] = [listener]
    printed = io.StringIO()
    with patch.object(log, "configure", configured), redirect_stdout(printed):
        yield
    deepspeed_logger.handlers[:] = theirs
    seen["messages"] += [_without_times(line) for line in printed.getvalue().splitlines()]


@contextmanager
def _deepspeed(seen: Observation) -> Iterator[None]:
    """See what DeepSpeed is given."""
    initialize = deepspeed.initialize

    def watched(**words: Any) -> Any:
        seen["deepspeed"] = [words["config"], type(words["optimizer"]).__name__]
        return initialize(**words)

    with patch.object(deepspeed, "initialize", watched):
        yield


@contextmanager
def _attention(seen: Observation) -> Iterator[None]:
    """See whether PyTorch's kernel computes attention, and how often."""
    kernel = torch.nn.functional.scaled_dot_product_attention

    def watched(*words: Any, **named: Any) -> Tensor:
        seen["attention"].append(list(words[0].shape))
        return kernel(*words, **named)

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", watched):
        yield


@contextmanager
def _packages(seen: Observation, *, folder: Path) -> Iterator[None]:
    """Stand in for the packages that send or measure, and see what they are given."""
    from torch.utils import tensorboard

    reported = seen["writers"]
    real = tensorboard.SummaryWriter

    def summary_writer(**words: Any) -> Any:
        reported.append(["SummaryWriter", words])
        return real(**words)

    def wandb_init(*, config: Any, **words: Any) -> Any:
        reported.append(["wandb", words])
        return SimpleNamespace(dir=words["dir"] or str(folder / "wandb"))

    def tracker(*, output_handlers: Any, **words: Any) -> Any:
        reported.append(["codecarbon", words])
        (output,) = output_handlers
        total = SimpleNamespace(energy_consumed=1.0, emissions=1.0)
        return SimpleNamespace(
            start=lambda: None, stop=lambda: None, flush=lambda: output.out(total, total)
        )

    modules = {
        "wandb": _module("wandb", init=wandb_init, finish=lambda: None, Error=RuntimeError),
        "codecarbon": _module("codecarbon", OfflineEmissionsTracker=tracker),
    }
    # Not patch.dict, which would forget what else is imported meanwhile.
    hidden = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    with patch.object(tensorboard, "SummaryWriter", summary_writer):
        yield
    for name, module in hidden.items():
        sys.modules.pop(name)
        if module:
            sys.modules[name] = module


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(content)
    return module


@contextmanager
def _process(seen: Observation) -> Iterator[None]:
    """Record what the process learns of itself, and take it back."""
    from megatron.training import setup

    kept = dict(os.environ)
    signals = {number: signal.getsignal(number) for number in _SIGNALS}
    threads = torch.get_num_threads()

    join = setup.distributed.start

    def start(backend: str, level: str, *, timeout_minutes: int, **where: Any) -> None:
        seen["process"] = [backend, level, timeout_minutes]
        join(backend, level, timeout_minutes=timeout_minutes, **where)

    with patch.object(setup.distributed, "start", start):
        yield
    os.environ.clear()
    os.environ.update(kept)
    for number, usual in signals.items():
        signal.signal(number, usual)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def _scalars(folder: Path) -> Any:
    found = []
    for file in sorted(folder.rglob("*tfevents*")):
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                timed = any(word in value.tag for word in _TIMED_TAGS)
                number = [] if timed else list(value.tensor.float_val)
                found.append((value.tag, event.step, number))
    return found
