"""Table of all Triton kernels."""

from dataclasses import replace

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.fused_kernels.triton.activations import bias_gelu, glu
from megatron.fused_kernels.triton.bias_dropout_add import bias_dropout_add
from megatron.fused_kernels.triton.cross_entropy import TRITON as CROSS_ENTROPY
from megatron.fused_kernels.triton.decode_attention import decode_attention
from megatron.fused_kernels.triton.heads import split_heads
from megatron.fused_kernels.triton.norms import add_norm, layer_norm, rms_norm
from megatron.fused_kernels.triton.rotary import rotary
from megatron.fused_kernels.triton.softmax import (
    scaled_causal_softmax,
    scaled_masked_softmax,
)

TRITON = replace(
    REFERENCE,
    scaled_causal_softmax=scaled_causal_softmax,
    scaled_masked_softmax=scaled_masked_softmax,
    layer_norm=layer_norm,
    rms_norm=rms_norm,
    bias_gelu=bias_gelu,
    bias_dropout_add=bias_dropout_add,
    glu=glu,
    rotary=rotary,
    split_heads=split_heads,
    split_sums_bias=True,
    cross_entropy=CROSS_ENTROPY,
    activation_adds_bias=True,
    add_norm=add_norm,
    decode_attention=decode_attention,
)
"""Kernels of a GPU with every operation fused."""
