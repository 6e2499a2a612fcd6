"""How gradients become new weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.parsing.flags import Spelling


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, as the user asked for it."""

    optimizer: Literal[
        "adam", "adamw", "fused_adam", "adam8bit", "sgd", "lion", "muon", "dist_muon"
    ] = "adam"
    """adam is Adam with decoupled weight decay, and so are adamw and fused_adam; adam8bit keeps its
    state in 8 bits; muon, or dist_muon, is Muon for the layers' matrices and AdamW for the rest."""

    optimizer_impl: Literal["auto", "torch", "deepspeed", "apex"] = "auto"
    """Whose kernels run adam (deepspeed's run lion too); auto: torch's, or deepspeed's for the CPU
    with --cpu-optimizer."""

    use_bnb_optimizer: bool = False
    """Adam with its state in 8 bits, of the bitsandbytes package, and a norm of the token embedding:
    --optimizer adam8bit with --embed-layernorm."""

    cpu_optimizer: Annotated[bool, Spelling("--cpu-optimizer", ("--optimizer-cpu-offload",))] = (
        False
    )
    """Keep the optimizer's state in the host's memory and step on its processor."""

    cpu_torch_adam: Annotated[bool, Spelling("--cpu_torch_adam", ("--cpu-torch-adam",))] = False
    """With --cpu-optimizer: torch's Adam in place of DeepSpeed's, which has to be compiled first."""

    use_distributed_optimizer: bool = False
    """Divide the optimizer's state over the replicas: ZeRO stage 1, unless a stage is said."""

    bitfit: bool = False
    """Train the biases alone and freeze all other weights."""

    weight_decay: float = 0.01
    """Decay of weight matrices and embeddings; biases and norms are never decayed."""

    start_weight_decay: float | None = None
    """Weight decay at the first step, when it moves over the run."""

    end_weight_decay: float | None = None
    """Weight decay at the end of the run, when it moves."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight decay moves from --start-weight-decay to --end-weight-decay."""

    clip_grad: float = 1.0
    """Largest norm of the gradient over the whole network; 0 turns clipping off."""

    adam_beta1: float = 0.9
    """Decay of the running mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of the running mean of squared gradients."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    sgd_momentum: float = 0.9
    """Momentum of sgd."""

    lion_beta1: float = 0.95
    """How much of the running mean is in the direction of lion's step."""

    lion_beta2: float = 0.98
    """Decay of lion's running mean of gradients."""

    muon_momentum: float = 0.95
    """Momentum of the gradients that muon makes orthogonal."""

    muon_nesterov: Annotated[bool, Spelling("--muon-nesterov", ("--muon-use-nesterov",))] = False
    """Look one step ahead along muon's momentum."""

    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations that make one step of muon orthogonal."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """What muon's orthogonal step is multiplied by, of a matrix with r rows and c columns: spectral
    sqrt(max(r, c)), unit_rms_norm sqrt(r / c), shape_scaling sqrt(max(1, r / c))."""

    muon_extra_scale_factor: float = 1.0
    """A further factor of muon's step; 0.2 with spectral makes it as long as one of adam."""
