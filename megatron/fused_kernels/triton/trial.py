"""Trial calls of the Triton kernels, of few rows: whether they compile and run on this GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.activations import GATES
from megatron.fused_kernels.triton.activations import bias_gelu, glu
from megatron.fused_kernels.triton.bias_dropout_add import bias_dropout_add
from megatron.fused_kernels.triton.cross_entropy import TRITON as CROSS_ENTROPY
from megatron.fused_kernels.triton.decode_attention import decode_attention
from megatron.fused_kernels.triton.heads import split_heads
from megatron.fused_kernels.triton.norms import add_norm
from megatron.fused_kernels.triton.rotary import rotary
from megatron.fused_kernels.triton.softmax import scaled_causal_softmax, scaled_masked_softmax

_ROWS = 16  # Triton compiles apart for sizes that 16 does not divide
_KEYS = (256, 1024)  # that one program attends to, and that several divide


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Inputs of the calls: the sizes of one rank's network.

    Args:
        tensor: ranks that share a layer.
        trains: whether there is a backward pass.
    """

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    tensor: int
    trains: bool

    def new(self, *shape: int) -> Tensor:
        """Return zeros, which have a gradient in training."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device, requires_grad=self.trains)

    @property
    def groups(self) -> int:
        """Query groups of a rank."""
        return max(1, self.spec.attention.num_query_groups // self.tensor)

    @property
    def queries(self) -> int:
        """Query heads of a group."""
        return self.spec.attention.num_attention_heads // self.tensor // self.groups


def try_kernels(operation: str, trial: Trial) -> None:
    """Run the kernels of `operation` once, in training backward too.

    RNG states stay as they are.

    Raises:
        Exception: whatever Triton, its compiler or the driver raises.
    """
    devices = [trial.device] if trial.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.set_grad_enabled(trial.trains):
        results = [each for each in _CALLS[operation](trial) if each.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(each) for each in results])
    torch.zeros(1, device=trial.device).item()  # waits for the kernels, whose errors come late


def _softmax(trial: Trial) -> list[Tensor]:
    keys = trial.spec.seq_length + trial.spec.attention.has_sinks
    mask = torch.ones(_ROWS, keys, dtype=torch.bool, device=trial.device)
    return [
        scaled_causal_softmax(trial.new(1, 1, _ROWS, keys), 1.0),
        scaled_masked_softmax(trial.new(1, 1, _ROWS, keys), mask, 1.0),
    ]


def _norm(trial: Trial) -> list[Tensor]:
    width, centred = trial.spec.hidden_size, trial.spec.norm.normalization == "LayerNorm"
    x, y, weight = trial.new(_ROWS, width), trial.new(_ROWS, width), trial.new(width)
    bias = trial.new(width) if centred else None
    y_bias = trial.new(width) if trial.spec.mlp.linear_bias else None
    return [
        *add_norm(x, None, None, weight, bias, 1.0, centred),
        *add_norm(x, y, y_bias, weight, bias, 1.0, centred),
    ]


def _activation(trial: Trial) -> list[Tensor]:
    mlp = trial.spec.mlp
    x = trial.new(_ROWS, mlp.inner_features // trial.tensor)
    bias = trial.new(x.size(1)) if mlp.linear_bias else None
    for kind in GATES:
        if kind == mlp.activation:
            return [glu(x, bias, kind)]
    return [bias_gelu(x, bias, "erf" if mlp.activation == "gelu_erf" else "tanh")]


def _bias_dropout_add(trial: Trial) -> list[Tensor]:
    width = trial.spec.hidden_size
    bias = trial.new(width) if trial.spec.mlp.linear_bias else None
    y, residual = trial.new(_ROWS, width), trial.new(_ROWS, width)
    p = trial.spec.hidden_dropout if trial.trains else 0.0
    return [bias_dropout_add(y, bias, residual, p, trial.trains)]


def _heads(trial: Trial, tables: tuple[Tensor, Tensor] | None = None) -> list[Tensor]:
    fused = trial.new(_ROWS, 1, trial.groups, trial.queries + 2, trial.spec.attention.head_dim)
    bias = trial.new(fused[0].numel()) if trial.spec.attention.qkv_bias else None
    return [*split_heads(fused * 1, bias, tables)]


def _rotary(trial: Trial) -> list[Tensor]:
    angles = torch.zeros(_ROWS, trial.spec.positions.rotary_dim // 2, device=trial.device)
    x = trial.new(1, trial.groups, _ROWS, trial.spec.attention.head_dim)
    return [*_heads(trial, (angles, angles)), rotary(x, angles, angles)]


def _decode_attention(trial: Trial) -> list[Tensor]:
    attention, positions = trial.spec.attention, trial.spec.positions
    heads, width = trial.groups * trial.queries, attention.head_dim
    new = trial.new(1, trial.groups, 1, width)
    per_head = torch.zeros(heads, device=trial.device)
    return [
        decode_attention(
            trial.new(1, heads, 1, width),
            new,
            new,
            (trial.new(1, trial.groups, keys, width), trial.new(1, trial.groups, keys, width)),
            torch.full((1,), keys - 1, device=trial.device),
            range(keys),
            window=attention.window,
            scale=1.0,
            softcap=attention.attention_softcap,
            slopes_a=per_head if positions.position_embedding == "alibi" else None,
            sinks_a=per_head.to(trial.dtype) if attention.has_sinks else None,
        )
        for keys in _KEYS
    ]


def _cross_entropy(trial: Trial) -> list[Tensor]:
    columns = trial.spec.vocabulary.padded_vocab_size // trial.tensor
    target = torch.zeros(_ROWS, dtype=torch.int64, device=trial.device)
    logits, kernels = trial.new(_ROWS, columns) * 1, CROSS_ENTROPY
    if trial.tensor == 1:
        return [kernels.full(logits, target, columns)]
    largest = kernels.largest(logits.detach(), columns)
    total, _ = kernels.sums(logits.detach(), largest, target, columns)
    kernels.gradient(logits.detach(), total, target, largest, columns)
    return []


_CALLS: Mapping[str, Callable[[Trial], list[Tensor]]] = {
    "softmax": _softmax,
    "norm": _norm,
    "activation": _activation,
    "bias, dropout, residual": _bias_dropout_add,
    "rotary positions": _rotary,
    "queries, keys, values": _heads,
    "attention of decode steps": _decode_attention,
    "cross-entropy": _cross_entropy,
}
"""Calls by operation; their results have gradients in training."""
