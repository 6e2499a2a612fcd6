"""Trials of Triton kernels at start, agreed on by all ranks: whether they compile and run."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from megatron.common.errors import ConfigError
from megatron.common.registry import import_dotted
from megatron.config.network.model_spec import ModelSpec
from megatron.config.parallelism.kernels_plan import FLAGS
from megatron.fused_kernels.attention_choice import AttentionWork

_TRITON = "megatron.fused_kernels.triton"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes on one rank, compared with the limits of kernels.

    Args:
        positions: tokens of a micro-batch.
        tensor: ranks that share a layer.
        has_spans: whether batches limit what tokens see: documents, prefixes, padding.
        ring: whether ranks attend to each other's tokens by ring attention.
        trains: whether there is a backward pass.
    """

    spec: ModelSpec
    dtype: torch.dtype
    positions: int
    tensor: int
    device: torch.device
    has_spans: bool = False
    ring: bool = False
    trains: bool = True

    def of_attention(self) -> AttentionWork:
        """Return the work of attention on one rank."""
        return AttentionWork(
            spec=self.spec,
            dtype=self.dtype,
            device=self.device,
            samples=max(1, self.positions // self.spec.seq_length),
            heads=self.spec.attention.num_attention_heads // self.tensor,
            groups=max(1, self.spec.attention.num_query_groups // self.tensor),
            has_spans=self.has_spans,
            ring=self.ring,
        )


Launch = Callable[[Workload, str | None], None]
"""(work, operation) launches the Triton kernels of an operation, with None a trivial one.

It raises whatever Triton, its compiler or the driver raises where that does not work.
"""


def _launch(work: Workload, operation: str | None) -> None:
    """See `Launch`."""
    if not find_spec("triton"):
        raise ModuleNotFoundError("the package triton is not installed")
    if operation is None:
        import_dotted(f"{_TRITON}.launch.launch_once")(work.device)
        return
    names = ("spec", "dtype", "device", "tensor", "trains")
    trial = import_dotted(f"{_TRITON}.trial.Trial")(**{name: getattr(work, name) for name in names})
    import_dotted(f"{_TRITON}.trial.try_kernels")(operation, trial)


def _alone(reason: str | None) -> str | None:
    return reason


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Trial launches, whose failure on one rank counts on all.

    Ranks must run the same kernels: dropout of Triton and of PyTorch, for instance, draw different
    masks, and activations that tensor-parallel ranks hold in common would drift apart.

    Args:
        launch: launches Triton kernels.
        agree: returns why a launch failed on any rank, given why it failed on this one; every rank
            calls it in step. The default is for a single process.
    """

    launch: Launch = _launch
    agree: Callable[[str | None], str | None] = _alone

    def failure(self, work: Workload, operation: str | None) -> str | None:
        """Return why kernels cannot be launched on some rank, see `Launch`; None if they can.

        Raises:
            ConfigError: this rank's GPU runs nothing more after them.

        Communication: `agree`, once.
        """
        reason = self._own_failure(work, operation)
        # Before the ranks agree, which may need the GPU.
        if reason and operation and self._own_failure(work, None):
            raise ConfigError(
                f"Triton's kernel for {operation} failed, and after it the GPU runs nothing more: "
                f"{reason}; turn the kernel off with {turning_off(operation)}"
            )
        return self.agree(reason)

    def _own_failure(self, work: Workload, operation: str | None) -> str | None:
        try:
            self.launch(work, operation)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever Triton, the compiler or the driver raises
            return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        return None


ALONE = Trials()
"""Trials of a single process."""


def turning_off(operation: str) -> str:
    """Return the flag that turns the fused kernel of `operation` off."""
    return FLAGS.get(operation, "--kernels reference")
