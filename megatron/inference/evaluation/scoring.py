"""Log-probabilities of given tokens under the model, for perplexity and multiple-choice tasks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.engine.model_runner import ModelRunner
from megatron.inference.evaluation.windows import Window


@dataclass(frozen=True)
class Score:
    """Score of a window's target tokens.

    Args:
        log_probability: their sum, in nats.
        is_greedy: whether each is the most likely token at its position.
    """

    log_probability: float
    is_greedy: bool


@torch.inference_mode()
def score_windows(
    runner: ModelRunner, windows: Sequence[Window], batches: Iterable[Sequence[int]]
) -> Tensor:
    """Return the sum of the targets' log-probabilities, and how many are the most likely token.

    Args:
        windows: of all replicas.
        batches: indices of the windows that this replica runs together.

    Shapes: returns [n, 2] float64, n the number of windows: zeros for windows in none of the
        batches, and on all ranks but one of the replica.
    Communication: all ranks of the replica must call this, in step.
    """
    found_n2 = torch.zeros(len(windows), 2, dtype=torch.float64, device=runner.device)
    for batch in batches:
        own = [windows[index] for index in batch]
        ends = [len(window.tokens) - 1 for window in own]
        features_bsh = runner.prefill(
            [window.tokens[:-1] for window in own],
            # The context is the prompt of a prefix language model.
            [end + 1 - window.num_targets for end, window in zip(ends, own, strict=True)],
        )
        if not runner.has_logits:
            continue
        features = torch.cat(
            [
                features_bsh[row, end - window.num_targets : end]
                for row, (end, window) in enumerate(zip(ends, own, strict=True))
            ]
        )
        targets = [token for window in own for token in window.tokens[-window.num_targets :]]
        scores_n2 = runner.logprobs(features, targets)
        if not scores_n2.isfinite().all():
            raise runner.nonfinite_logits_error()
        by_window = scores_n2.split([window.num_targets for window in own])
        if runner.groups.tensor_rank == 0:
            found_n2[list(batch)] = torch.stack([part.sum(0) for part in by_window])
    return found_n2
