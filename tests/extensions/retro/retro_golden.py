"""A Retro with weights by formula, and its logits in the form of Megatron core."""

import math

import torch

CORE_LOGITS = [
    [10.356852, -11.800895, -15.14813, 5.650606],
    [11.876653, -10.091051, -15.973717, 3.605566],
    [11.181852, -11.145421, -15.707001, 4.768226],
]
"""First four at [0, 0], [0, 3] and [1, 15] of `golden_batch`: its modules give them in float64."""

CORE_LOSS = 18.78028152


def golden_tensor(tag, *shape):
    """Return 0.25 sin(0.7 j + a), with a from the bytes of `tag`; 1 + a tenth of it for scales."""
    j = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    values = 0.25 * (0.7 * j + sum(tag.encode()) % 97).sin()
    return 1 + 0.1 * values if tag.endswith("norm.weight") else values


def golden_batch():
    tokens = (torch.arange(32).view(2, 16) * 7 + 3) % 32
    return {
        "tokens": tokens,
        "positions": torch.arange(16).expand(2, 16),
        "labels": (tokens * 3 + 1) % 32,
        "loss_mask": torch.ones(2, 16, dtype=torch.float64),
        "neighbor_tokens": (torch.arange(128).view(2, 4, 2, 8) * 5 + 1) % 32,
        "neighbor_lengths": torch.full((2, 4, 2), 8),
    }
