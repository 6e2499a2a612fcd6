"""A GPU without hardware: tensors on `cuda` with shapes and dtypes but no memory.

`load_device` comes before PyTorch is imported; inside `fake_gpu()` PyTorch then offers an H100, on
which operations compute shapes alone. An operation on tensors of two devices raises, as on a GPU.
Triton kernels and attention are recorded instead of run. What the host reads of the device is
one, or False, and is counted: on a GPU it waits there. Boolean masks select all elements.
"""

import ctypes
import os
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

SOURCE = Path(__file__).with_name("device.cpp")


def load_device(folder: Path) -> None:
    """Compile the device to `folder` and load it: before PyTorch, a build for CPUs, is imported."""
    (torch_folder,) = find_spec("torch").submodule_search_locations  # does not import it
    library = folder / "device.so"
    libraries = f"{torch_folder}/lib"
    options = ["-shared", "-fPIC", "-std=c++20", "-w", f"-I{torch_folder}/include"]
    options += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    subprocess.run(
        ["g++", *options, str(SOURCE), "-o", str(library), "-lc10", "-ltorch_cpu"], check=True
    )
    ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL)


class Seen:
    """What happened on the fake GPU.

    Attributes:
        waits: of the host, by the line that waits.
        operations: of PyTorch on the device, without views.
        kernels: Triton's and attention.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def clear(self) -> None:
        """Begin to count anew."""
        for counts in (self.waits, self.operations, self.kernels):
            counts.clear()

    def wait(self, what: str) -> None:
        """Count a wait of the caller."""
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "/torch/" not in frame.filename and frame.filename != __file__
        ]
        near = frames[-1]
        self.waits[f"{what} at {'/'.join(near.filename.split('/')[-3:])}:{near.lineno}"] += 1


@contextmanager
def fake_gpu() -> Iterator[Seen]:
    """Let PyTorch offer an H100 inside the block."""
    import torch
    import torch.nn.functional as F
    from torch._subclasses import fake_tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    aten, seen = torch.ops.aten, Seen()
    free = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}

    def is_mask(index: Any) -> bool:
        return index is not None and index.dtype == torch.bool

    def places(mask: Any) -> Any:
        """Return an index of all elements: how many are True is not known here."""
        return torch.zeros(mask.numel(), dtype=torch.int64, device=mask.device)

    class Fake(fake_tensor.FakeTensorMode):
        avoid_device_init = True  # torch.tensor makes host memory, and copies it

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            kwargs = kwargs or {}
            if func is aten._local_scalar_dense.default:
                if args[0].is_cuda:
                    seen.wait("read")
                # An overflow is a flag of DeepSpeed's in one byte.
                return 1.0 if args[0].is_floating_point() else int(args[0].dtype.itemsize > 1)
            if func is aten._fused_sdp_choice.default:
                return torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
            if func is aten.nonzero.default:
                seen.wait("nonzero")
                return torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device="cuda")
            if func is aten.index.Tensor and any(map(is_mask, args[1])):
                seen.wait("boolean index")
                args = args[0], [places(x) if is_mask(x) else x for x in args[1]]
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                copies = func in (aten.copy_.default, aten._to_copy.default)
                if copies and not result.is_cuda and args[func is aten.copy_.default].is_cuda:
                    is_async = kwargs.get("non_blocking") or args[2:]
                    if not is_async:
                        seen.wait("copy to the host")
                if result.is_cuda and not func.is_view and func not in free:
                    seen.operations[func.__name__] += 1
            return result

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            ctx.save_for_backward(query, key, value)
            seen.kernels["attention"] += 1
            return query.new_empty(*query.shape[:-1], value.size(-1))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.kernels["attention, backward"] += 1
            return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> Any:
        _require_gpu("attention", [query, key, value, *([] if attn_mask is None else [attn_mask])])
        return Attention.apply(query, key, value)

    def swap(mine: Any, other: Any) -> None:
        """Exchange what `Module.to` has moved, but keep attributes of parameters."""
        torch._C._swap_tensor_impl(mine, other)
        mine.fake_device, other.fake_device = other.fake_device, mine.fake_device

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        _require_gpu(kernel.fn.__name__, tensors)
        seen.kernels[f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"] += 1

    with ExitStack() as stack:
        for owner, names in _replacements(seen).items():
            for name, value in names.items():
                stack.enter_context(patch.object(owner, name, value))
        if find_spec("triton"):
            from triton.runtime.jit import JITFunction

            stack.enter_context(patch.object(JITFunction, "run", launch))
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attend))
        stack.enter_context(patch.object(torch.utils, "swap_tensors", swap))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(Fake(allow_non_fake_inputs=True))
        stack.enter_context(Watch())
        yield seen


def _require_gpu(name: str, tensors: list[Any]) -> None:
    for tensor in tensors:
        if not tensor.is_cuda:
            raise RuntimeError(f"{name}: a tensor is on {tensor.device}, not on the GPU")


def _replacements(seen: Seen) -> dict[Any, dict[str, Any]]:
    """Return functions of PyTorch that would call the driver, and what takes their place."""
    import torch

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        total_memory=80 << 30,
        multi_processor_count=132,
        major=9,
        minor=0,
        uuid="fake",
    )

    generator = SimpleNamespace(
        get_state=lambda: torch.zeros(16, dtype=torch.uint8),
        set_state=lambda state: None,
        manual_seed=lambda seed: None,
        initial_seed=lambda: 0,
    )

    class Stream:
        """Nothing waits for it."""

        def __init__(self, *args: Any, **kwargs: Any):
            self.device, self.cuda_stream, self.stream_id = torch.device("cuda", 0), 0, 0

        def wait_stream(self, other: Any) -> None: ...

        def wait_event(self, event: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            return Event()

        def synchronize(self) -> None:
            seen.wait("synchronize a stream")

    class Event:
        """Recorded and over."""

        def __init__(self, *args: Any, **kwargs: Any): ...

        def record(self, stream: Any = None) -> None: ...

        def wait(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return 1.0

        def synchronize(self) -> None:
            seen.wait("synchronize an event")

    stream = Stream()
    # A function for each name: dynamo has a table of them.
    no_calls = "set_device manual_seed manual_seed_all set_rng_state _lazy_init empty_cache"
    no_calls += " reset_peak_memory_stats reset_max_memory_allocated"
    zeros = "current_device memory_allocated max_memory_allocated"
    zeros += " memory_reserved max_memory_reserved"
    nothing = {name: lambda *args, **kwargs: None for name in no_calls.split()}
    zero = {name: lambda *args: 0 for name in zeros.split()}
    blocks = {name: lambda *args: nullcontext() for name in ("stream", "device", "device_of")}
    cuda = {
        **nothing,
        **zero,
        **blocks,
        "default_generators": (generator,),
        "Stream": Stream,
        "Event": Event,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_stream": lambda *args: stream,
        "default_stream": lambda *args: stream,
        "get_device_capability": lambda *args: (9, 0),
        "get_device_name": lambda *args: properties.name,
        "get_device_properties": lambda *args: properties,
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "memory_stats": lambda *args: {},
        "mem_get_info": lambda *args: (80 << 30, 80 << 30),
        "synchronize": lambda *args: seen.wait("synchronize"),
    }
    marks = {name: lambda *args: None for name in ("range_push", "range_pop", "mark")}
    tensor = {"pin_memory": lambda self, *args: self, "record_stream": lambda self, stream: None}
    return {torch.cuda: cuda, torch.cuda.nvtx: marks, torch.Tensor: tensor}
