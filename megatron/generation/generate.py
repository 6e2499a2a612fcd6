"""Tokens after a prompt."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.generation.sampling import Sampling, choose_tokens

Logits = Callable[[tuple[Tensor, Tensor]], Tensor]
"""(tokens_bs, positions_bs) -> logits_bsv"""


@torch.no_grad()
def generate(
    logits_of: Logits,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_length: int,
    eod: int,
    vocab_size: int,
    sampling: Sampling,
    device: torch.device,
) -> list[list[int]]:
    """Return each prompt with its continuation, which ends at `eod` or at a limit.

    Prompts may differ in length: shorter rows are padded at the end, where a causal model does
    not look, and every row's next token is read at its own last place.

    Args:
        max_new_tokens: most tokens added to a prompt.
        max_length: most tokens of prompt and continuation together: the model's positions.

    Raises:
        ConfigError: a prompt is empty or leaves no room for a token.

    Randomness: see choose_tokens.
    """
    for prompt in prompts:
        if not 0 < len(prompt) < max_length:
            raise ConfigError(
                f"a prompt has {len(prompt)} tokens; it needs at least 1 and at most "
                f"{max_length - 1}, one less than the model's --max-position-embeddings"
            )
    rows = [list(prompt) for prompt in prompts]
    limits = [min(max_length, len(row) + max_new_tokens) for row in rows]
    while running := [i for i, row in enumerate(rows) if _goes_on(row, prompts[i], limits[i], eod)]:
        tokens_bs = _padded([rows[i] for i in running], eod, device)
        positions_bs = torch.arange(tokens_bs.size(1), device=device).expand_as(tokens_bs)
        logits_bsv = logits_of((tokens_bs, positions_bs))
        last_b = torch.tensor([len(rows[i]) - 1 for i in running], device=device)
        logits_bv = logits_bsv[torch.arange(len(running), device=device), last_b]
        chosen = choose_tokens(logits_bv, sampling, vocab_size=vocab_size)
        for i, token in zip(running, chosen.tolist(), strict=True):
            rows[i].append(token)
    return rows


def _goes_on(row: Sequence[int], prompt: Sequence[int], limit: int, eod: int) -> bool:
    ended = len(row) > len(prompt) and row[-1] == eod
    return not ended and len(row) < limit


def _padded(rows: Sequence[Sequence[int]], padding: int, device: torch.device) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (length - len(row))] for row in rows], device=device)
