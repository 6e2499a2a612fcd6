"""FlashAttention of the flash-attn package, with the shapes and arguments used here."""

import torch
from torch import Tensor


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    window: int,
    slopes_a: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Compute attention; arguments as in `model/layers/attention_kernels.py`.

    Args:
        window: keys that a query attends to, itself included; 0 for all.

    Shapes: query [b, a, sq, d], key and value [b, g, sk, d], slopes_a [a] -> [b, a, sq, d].
    Source: arXiv:2205.14135, arXiv:2307.08691; https://github.com/Dao-AILab/flash-attention.
    """
    from flash_attn import flash_attn_func

    # The package counts the keys to the left and to the right; -1 is all of them.
    reach = (window - 1, 0 if causal else window - 1) if window else (-1, -1)
    mixed = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        dropout_p=dropout,
        softmax_scale=scale,
        **({"softcap": softcap} if softcap else {}),  # versions from 2.6 on have it
        # As PyTorch's own kernels under --deterministic-mode; versions from 2.4.1 on have it.
        **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}),
        causal=causal,
        window_size=reach,
        alibi_slopes=None if slopes_a is None else slopes_a.to(torch.float32),
    )
    return mixed.transpose(1, 2)
