"""What a network thinks of tokens that are there already."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.engine.model_runner import Stage
from megatron.inference.evaluation.windows import Window


@dataclass(frozen=True)
class Score:
    """What was found of a window's judged tokens.

    Args:
        log_probability: of all of them, in nats.
        is_likeliest: whether each was the likeliest one at its place.
    """

    log_probability: float
    is_likeliest: bool


@torch.inference_mode()
def judge(stage: Stage, windows: Sequence[Window], batches: Iterable[Sequence[int]]) -> Tensor:
    """Return the sum of log-probabilities, and how many tokens were the likeliest.

    Args:
        windows: all.
        batches: places in `windows` that are read together.

    Shapes: returns [n, 2] float64, n all windows: zeros for windows in none of the batches, and on
        all ranks but one of those that make up the model.
    Communication: all ranks that make up the model must call this, in step.
    """
    found_n2 = torch.zeros(len(windows), 2, dtype=torch.float64, device=stage.device)
    for batch in batches:
        read = [windows[place] for place in batch]
        ends = [len(window.tokens) - 1 for window in read]
        features_bsh = stage.read(
            [window.tokens[:-1] for window in read],
            # What stands before is a prompt, where the tokens of a prompt see each other.
            [end + 1 - window.judged for end, window in zip(ends, read, strict=True)],
        )
        if not stage.has_logits:
            continue
        features = torch.cat(
            [
                features_bsh[row, end - window.judged : end]
                for row, (end, window) in enumerate(zip(ends, read, strict=True))
            ]
        )
        targets = [token for window in read for token in window.tokens[-window.judged :]]
        judged_n2 = stage.judged(features, targets)
        if not judged_n2.isfinite().all():
            raise stage.no_numbers()
        by_window = judged_n2.split([window.judged for window in read])
        if stage.groups.tensor_rank == 0:
            found_n2[list(batch)] = torch.stack([part.sum(0) for part in by_window])
    return found_n2
