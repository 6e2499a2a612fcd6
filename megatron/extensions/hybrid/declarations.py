"""Architectures of transformers that are hybrid networks."""

from megatron.common.registry import FAMILIES

FAMILIES.declare("hybrids", "megatron.extensions.hybrid.checkpoints", None)
