"""The optimizer: flags, resolution and checks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from megatron.common.registry import OPTIMIZERS, OwnFlags
from megatron.config.parsing.declaration import range_problems, resolve, setting


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, weight decay and gradient clipping."""

    optimizer: str = setting("adam", names=OPTIMIZERS, plan="optimizer.name")
    """adam is Adam with decoupled weight decay, and so are adamw and fused_adam; adam8bit keeps its
    state in 8 bits; muon, or dist_muon, is Muon for the layers' matrices and AdamW for the rest."""

    optimizer_impl: Literal["auto", "torch", "deepspeed", "apex"] = "auto"
    """Implementation of adam (deepspeed's also of lion); auto: torch's, or deepspeed's for the CPU
    with --cpu-optimizer."""

    use_bnb_optimizer: bool = False
    """Adam with its state in 8 bits, of the bitsandbytes package, and a norm of the token embedding:
    --optimizer adam8bit with --embed-layernorm."""

    cpu_optimizer: bool = setting(False, older=("--optimizer-cpu-offload",))
    """Offload the optimizer: keep its state in host memory and step on the CPU."""

    cpu_torch_adam: bool = setting(False, flag="--cpu_torch_adam", older=("--cpu-torch-adam",))
    """With --cpu-optimizer: torch's Adam instead of DeepSpeed's, which has to be compiled first."""

    use_distributed_optimizer: bool = False
    """Shard the optimizer states over the replicas: ZeRO stage 1, unless a stage is given."""

    bitfit: bool = setting(False, plan="optimizer.biases_only")
    """BitFit: train only the biases and freeze all other weights."""

    freeze: list[str] | None = setting(None, repeats=True, plan="optimizer.frozen")
    """Freeze parameters: regular expressions, each searched in names such as
    embedding.word_embeddings.weight and layers.0.mlp.dense_h_to_4h.bias; the rest is trained."""

    weight_decay: float = setting(0.01, at_least=0)
    """Decay of weight matrices and embeddings; biases and norms are never decayed."""

    start_weight_decay: float | None = setting(None, at_least=0)
    """Weight decay at the first step, if it changes over the run."""

    end_weight_decay: float | None = setting(None, at_least=0)
    """Weight decay at the end of the run, if it changes."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting(
        "constant", plan="optimizer.weight_decay_style"
    )
    """Schedule of the weight decay from --start-weight-decay to --end-weight-decay."""

    apply_wd_to_qk_layernorm: bool = setting(False, plan="optimizer.decays_qk_norms")
    """Decay the weights and biases of the norms of queries and keys (--qk-layernorm) too."""

    clip_grad: float = setting(1.0, at_least=0)
    """Gradient clipping: maximum global norm; 0 turns clipping off."""

    adam_beta1: float = setting(0.9, at_least=0, below=1)
    """Decay of the running mean of gradients."""

    adam_beta2: float = setting(0.999, at_least=0, below=1)
    """Decay of the running mean of squared gradients."""

    adam_eps: float = setting(1e-8, at_least=0, plan="optimizer.eps")
    """Added to the root of the second moment."""

    sgd_momentum: float = setting(0.9, at_least=0, plan="optimizer.momentum")
    """Momentum of sgd."""

    lion_beta1: float = setting(0.95, at_least=0, below=1)
    """How much of the running mean is in the direction of lion's step."""

    lion_beta2: float = setting(0.98, at_least=0, below=1)
    """Decay of lion's running mean of gradients."""

    muon_momentum: float = setting(0.95, at_least=0, below=1, plan="optimizer.muon.momentum")
    """Momentum of the gradients that muon makes orthogonal."""

    muon_nesterov: bool = setting(
        False, older=("--muon-use-nesterov",), plan="optimizer.muon.nesterov"
    )
    """Look one step ahead along muon's momentum."""

    muon_num_ns_steps: int = setting(5, at_least=1, plan="optimizer.muon.steps")
    """Newton-Schulz iterations that make one step of muon orthogonal."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting(
        "spectral", plan="optimizer.muon.scale_mode"
    )
    """What muon's orthogonal step is multiplied by, of a matrix with r rows and c columns: spectral
    sqrt(max(r, c)), unit_rms_norm sqrt(r / c), shape_scaling sqrt(max(1, r / c))."""

    muon_extra_scale_factor: float = setting(1.0, above=0, plan="optimizer.muon.extra_scale")
    """A further factor of muon's step; 0.2 with spectral makes it as long as one of adam."""


_ALIASES = {"adamw": "adam", "fused_adam": "adam", "dist_muon": "muon"}
"""Other spellings of --optimizer."""

# NVIDIA's apex has this module; an unrelated package of the same name has not.
_MODULES = {"apex": "apex.optimizers", "bitsandbytes": "bitsandbytes.optim"}


@dataclass(frozen=True, kw_only=True)
class MuonPlan:
    """The constants of Muon's matrices."""

    momentum: float
    nesterov: bool
    steps: int  # Newton-Schulz iterations
    scale_mode: str
    extra_scale: float


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """The optimizer and its constants."""

    name: str  # adam, adam8bit, sgd, lion, muon, or a plugin's
    impl: Literal["torch", "deepspeed", "apex", "bitsandbytes"]
    on_cpu: bool  # whether it steps on the host, wherever the network computes
    biases_only: bool
    weight_decay: float  # at the start
    end_weight_decay: float
    weight_decay_style: Literal["constant", "linear", "cosine"]
    clip_grad: float  # 0: no clipping
    beta1: float
    beta2: float
    eps: float
    momentum: float
    muon: MuonPlan
    own_flags: OwnFlags = ()  # of a plugin's optimizer
    decays_qk_norms: bool = False
    embeddings_apart: bool = (
        False  # whether token embedding and output layer have a separate learning rate
    )
    frozen: tuple[str, ...] = ()  # regular expressions of names of parameters

    def freezes(self, name: str) -> bool:
        """Whether --freeze names the parameter `name`, or all whose names begin with it."""
        return any(re.search(pattern, name) for pattern in self.frozen)

    @property
    def state_bytes(self) -> int:
        """Bytes that its state takes per number: moments in 32 bits, or in 8.

        Muon's is counted for its matrices, which have one moment; the parameters that it updates with
        Adam have two. A plugin's optimizer is counted as Adam.
        """
        if self.name == "sgd":
            return 4 if self.momentum else 0
        return {"adam": 8, "adam8bit": 2, "lion": 4, "muon": 4}.get(self.name, 8)


def plan_optimizer(
    optimizer: OptimizerConfig,
    *,
    on_cpu: bool,
    own_flags: OwnFlags = (),
    embeddings_apart: bool = False,
) -> OptimizerPlan:
    """Return the decided optimizer.

    Args:
        on_cpu: whether its state is offloaded to the host.
        own_flags: of a plugin's optimizer.
        embeddings_apart: whether token embedding and output layer have a separate learning rate.
    """
    name = _name(optimizer)
    beta1, beta2 = optimizer.adam_beta1, optimizer.adam_beta2
    if name == "lion":
        beta1, beta2 = optimizer.lion_beta1, optimizer.lion_beta2
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return resolve(
        OptimizerPlan,
        "optimizer",
        optimizer,
        name=name,
        impl=_impl(optimizer),
        on_cpu=on_cpu,
        weight_decay=optimizer.weight_decay if start is None else start,
        end_weight_decay=optimizer.weight_decay if end is None else end,
        beta1=beta1,
        beta2=beta2,
        own_flags=own_flags,
        embeddings_apart=embeddings_apart,
    )


def _name(optimizer: OptimizerConfig) -> str:
    if optimizer.use_bnb_optimizer:
        return "adam8bit"
    return _ALIASES.get(optimizer.optimizer, optimizer.optimizer)


def _impl(optimizer: OptimizerConfig) -> Literal["torch", "deepspeed", "apex", "bitsandbytes"]:
    name = _name(optimizer)
    if name == "adam8bit":
        return "bitsandbytes"
    if optimizer.optimizer_impl != "auto":
        return optimizer.optimizer_impl
    compiled = optimizer.cpu_optimizer and not optimizer.cpu_torch_adam
    return "deepspeed" if compiled and name in ("adam", "lion") else "torch"


def optimizer_problems(optimizer: OptimizerConfig, *, device: str) -> Iterator[str]:
    """Yield every reason why this optimizer cannot run on `device`."""
    name, impl = _name(optimizer), _impl(optimizer)
    if optimizer.use_bnb_optimizer and _ALIASES.get(
        optimizer.optimizer, optimizer.optimizer
    ) not in ("adam", "adam8bit"):
        yield f"--use-bnb-optimizer is an Adam: leave out --optimizer {optimizer.optimizer}"
    if name == "adam8bit" and optimizer.optimizer_impl != "auto":
        yield (
            f"--optimizer-impl {optimizer.optimizer_impl} has no Adam with 8-bit state; leave it out"
        )
    elif impl == "apex" and name != "adam":
        yield f"--optimizer-impl apex has no {name} here; write --optimizer-impl torch"
    elif impl == "deepspeed" and name not in ("adam", "lion"):
        yield f"--optimizer-impl deepspeed has no {name} here; write --optimizer-impl torch"
    if optimizer.cpu_torch_adam and not optimizer.cpu_optimizer:
        yield "--cpu_torch_adam chooses the Adam of --cpu-optimizer: give that flag too"
    if optimizer.cpu_torch_adam and optimizer.optimizer_impl not in ("auto", "torch"):
        yield f"--cpu_torch_adam and --optimizer-impl {optimizer.optimizer_impl} exclude each other"
    if impl in ("apex", "bitsandbytes"):
        adam = "--optimizer-impl apex" if impl == "apex" else "Adam with 8-bit state"
        if device == "cpu" or optimizer.cpu_optimizer:
            yield f"{adam} needs a GPU to step on; write --optimizer adam --optimizer-impl torch"
        elif not _is_installed(_MODULES[impl]):
            yield (
                f"{adam} needs the module {_MODULES[impl]}, which is not installed; install it, or "
                "write --optimizer adam --optimizer-impl torch"
            )
    for pattern in optimizer.freeze or ():
        try:
            re.compile(pattern)
        except re.error as error:
            yield f"--freeze {pattern} is no regular expression: {error}"
    yield from range_problems(optimizer)
    yield from _decay_problems(optimizer)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _decay_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if optimizer.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            yield (
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
                "cosine; a constant one is --weight-decay"
            )
    elif start is None or end is None:
        yield (
            f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} needs both "
            "--start-weight-decay and --end-weight-decay"
        )
