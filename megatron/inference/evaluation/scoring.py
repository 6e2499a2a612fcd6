"""Score given tokens: context windows (sliding, disjoint) and the log-probabilities of their targets."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class Window:
    """Tokens of one forward pass.

    Args:
        tokens: the input is all of them but the last.
        num_targets: number of tokens at the end to score; at least 1, without the first token.
    """

    tokens: tuple[int, ...]
    num_targets: int


def sliding_windows(tokens: Sequence[int], *, length: int, stride: int) -> Iterator[Window]:
    """Yield windows, each `stride` tokens after the one before it.

    Every token but the first is scored once, in the first window that contains it.

    Args:
        length: most input tokens of a window.
        stride: at most `length`.

    >>> for window in sliding_windows(range(6), length=3, stride=2):
    ...     print(window.tokens)
    (0, 1, 2, 3)
    (2, 3, 4, 5)
    """
    start = scored = 0
    while scored < len(tokens) - 1:
        end = min(start + length, len(tokens) - 1)
        yield Window(tuple(tokens[start : end + 1]), end - scored)
        start, scored = start + stride, end


def full_windows(tokens: Sequence[int], *, length: int) -> Iterator[Window]:
    """Yield consecutive full windows; the last one overlaps the one before it.

    Every token but the first is scored once. These are lm_eval's rolling windows.

    >>> for window in full_windows(range(6), length=3):
    ...     print(window.tokens, window.num_targets)
    (0, 1, 2, 3) 3
    (2, 3, 4, 5) 2
    """
    for scored in range(0, len(tokens) - 1, length):
        end = min(scored + length, len(tokens) - 1)
        yield Window(tuple(tokens[max(0, end - length) : end + 1]), end - scored)


def last_window(context: Sequence[int], target: Sequence[int], *, length: int) -> Window:
    """Return the window that scores `target` after as much of `context` as fits.

    Args:
        context: one token at least.
        target: one at least, and at most `length`.
    """
    return Window((*context, *target)[-length - 1 :], len(target))


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
        batch_windows = [windows[index] for index in batch]
        features = _features(runner, batch_windows)
        if not runner.has_logits:
            continue
        targets = [
            token for window in batch_windows for token in window.tokens[-window.num_targets :]
        ]
        scores_n2 = runner.logprobs(features, targets)
        if not scores_n2.isfinite().all():
            raise runner.nonfinite_logits_error()
        by_window = scores_n2.split([window.num_targets for window in batch_windows])
        if runner.groups.tensor_rank == 0:
            found_n2[list(batch)] = torch.stack([part.sum(0) for part in by_window])
    return found_n2


def _features(runner: ModelRunner, windows: Sequence[Window]) -> Tensor:
    """Return the hidden states before the targets of each window; a context of several is run once.

    Shapes: returns [n, h], n the number of targets.
    """
    # The last token of a context is run with the targets, of which it predicts the first.
    contexts = [window.tokens[: -window.num_targets - 1] for window in windows]
    distinct = [*dict.fromkeys(contexts)]
    if runner.states and not runner.no_extension and all(distinct) and len(distinct) < len(windows):
        runner.prefill(distinct, [*map(len, distinct)])
        rows = [distinct.index(context) for context in contexts]
        runner.states.reorder(rows, max(map(len, distinct)))
        starts = [*map(len, contexts)]
        pairs = zip(windows, starts, strict=True)
        features_bsh = runner.extend([one.tokens[start:-1] for one, start in pairs], starts)
        firsts = [0] * len(windows)
    else:
        features_bsh = runner.prefill(
            [window.tokens[:-1] for window in windows],
            # The context is the prompt of a prefix language model.
            [len(context) + 1 for context in contexts],
        )
        firsts = [*map(len, contexts)]
    return torch.cat(
        [
            features_bsh[row, first : first + window.num_targets]
            for row, (first, window) in enumerate(zip(firsts, windows, strict=True))
        ]
    )
