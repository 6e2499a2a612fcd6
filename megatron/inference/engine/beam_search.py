"""The likeliest continuations of one prompt, found by keeping several at each step."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.engine.model_runner import Stage


@dataclass(frozen=True, kw_only=True)
class Search:
    """What to look for.

    Args:
        prompt: tokens, one at least.
        width: how many continuations are kept at each step.
        max_new_tokens: most tokens to add, one at least.
        stop_tokens: a continuation has ended with one of these.
        length_penalty: scores are divided by the length to this power; above 0 favours long ones.
    """

    prompt: tuple[int, ...]
    width: int
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    length_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Beam:
    """A continuation, its stop token included, and its log-probability over the penalised length."""

    tokens: tuple[int, ...]
    score: float


@torch.inference_mode()
def beam_search(stage: Stage, search: Search) -> Generator[None, None, list[Beam]]:
    """Return the best continuations, the best first: `width` at most. Yields after each token.

    A continuation that ends counts when it is among the first `width` of the candidates. The
    search is over when so many have ended, and the best that goes on would not be among them.

    Communication: every rank must call this, in step. Uses the first `width` rows of the cache.
    Source: Megatron-LM's description of its beam search.
    """
    assert stage.cache, "beams need rows in a cache"
    read = len(search.prompt)
    limit = min(search.max_new_tokens, stage.max_length - read)
    features = stage.read([search.prompt], [read])[:, -1]
    kept = [Beam(tokens=(), score=0.0)]
    ended: list[Beam] = []
    for length in range(1, limit + 1):
        penalty = length**search.length_penalty
        going: list[tuple[int, Beam]] = []
        for order, (score, row, token) in enumerate(_candidates(stage, features, kept, search)):
            tokens = (*kept[row].tokens, token)
            if token not in search.stop_tokens:
                going.append((row, Beam(tokens=tokens, score=score)))
            elif order < search.width:
                ended.append(Beam(tokens=tokens, score=score / penalty))
        going = going[: search.width]
        ended = sorted(ended, key=lambda beam: -beam.score)[: search.width]
        best = going[0][1].score / penalty if going else -float("inf")
        if len(ended) == search.width and ended[-1].score >= best:
            break
        if length == limit:
            ended += [Beam(tokens=beam.tokens, score=beam.score / penalty) for _, beam in going]
            break
        yield
        stage.cache.reorder([row for row, _ in going], read + length - 1)
        kept = [beam for _, beam in going]
        features = stage.go_on([beam.tokens[-1] for beam in kept], [read + length - 1] * len(kept))[
            :, 0
        ]
    return sorted(ended, key=lambda beam: -beam.score)[: search.width]


def _candidates(
    stage: Stage, features: Tensor, kept: list[Beam], search: Search
) -> list[tuple[float, int, int]]:
    """Return the best continuations by one token, twice as many as are kept.

    Returns:
        Log-probability of the whole, row of what it continues, and token.

    Raises:
        MegatronError: there are no numbers to choose by.
    """

    def decide() -> list[tuple[float, int, int]]:
        logits = stage.logits(features)
        if not logits.isfinite().all():
            return []
        scores_b1 = torch.tensor([[beam.score] for beam in kept], device=stage.device)
        sums_bv = logits.log_softmax(-1) + scores_b1
        best = sums_bv.flatten().topk(min(2 * search.width, sums_bv.numel()))
        return [
            (score, *divmod(place, sums_bv.size(1)))
            for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    if found := stage.decided(decide):
        return found
    raise stage.no_numbers()
