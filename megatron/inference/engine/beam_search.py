"""Beam search: the most likely continuations of one prompt."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.inference.engine.continuous_batching import ExclusiveRequest, InferenceEngine
from megatron.inference.engine.sequence import Request
from megatron.inference.runner.device import to_device
from megatron.inference.runner.model_runner import ModelRunner


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Generated tokens with their stop token, and their log-probability over the length penalty."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True, kw_only=True)
class BeamSearchRequest(ExclusiveRequest[Beam]):
    """Parameters of a beam search.

    Args:
        prompt: token ids, at least one.
        contexts: as of a `Request`.
        width: number of beams.
        max_new_tokens: most tokens to generate, at least one.
        stop_tokens: a beam is finished after one of these.
        length_penalty: scores are divided by length ** length_penalty; above 0 favours long beams.
    """

    prompt: tuple[int, ...]
    contexts: tuple[tuple[int, ...], ...] = ()
    width: int
    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    length_penalty: float = 1.0

    @classmethod
    def of(cls, request: Request, width: int, length_penalty: float) -> "BeamSearchRequest":
        """Return the search for the likeliest continuation of a request."""
        return cls(
            prompt=request.prompt,
            contexts=request.contexts,
            width=width,
            max_new_tokens=request.max_new_tokens,
            stop_tokens=request.stop_tokens,
            length_penalty=length_penalty,
        )

    def problems(self, engine: InferenceEngine) -> Iterator[str]:
        """Yield every reason to refuse the search."""
        new_tokens = max(1, self.max_new_tokens)
        request = Request(prompt=self.prompt, contexts=self.contexts, max_new_tokens=new_tokens)
        yield from engine.problems(request)
        if not 1 <= self.width <= engine.rows or not engine.runner.states:
            yield (
                f"a beam width of {self.width} must be between 1 and the {engine.rows} rows of the "
                "KV cache (--micro-batch-size, without --recompute)"
            )

    def run(self, runner: ModelRunner) -> Generator[None, None, list[Beam]]:
        """Return the most likely continuations of the prompt; see `beam_search`."""
        return beam_search(runner, self)


@torch.inference_mode()
def beam_search(
    runner: ModelRunner, request: BeamSearchRequest
) -> Generator[None, None, list[Beam]]:
    """Return at most `width` beams, the best first. Yields after each token.

    A finished beam counts if it is among the first `width` candidates. The search ends when
    `width` beams are finished and no running beam scores better than the worst of them.

    Communication: every rank must call this, in step. Uses the first `width` rows of the states.
    Source: Megatron-LM's description of its beam search.
    """
    assert runner.states, "beam search needs states"
    width, num_prompt = request.width, len(request.prompt)
    limit = min(request.max_new_tokens, runner.max_length - num_prompt)
    features = runner.prefill(
        [request.prompt], [num_prompt], contexts=[request.contexts], room=num_prompt + limit
    )[:, -1]
    beams = [Beam(tokens=(), score=0.0)]
    finished: list[Beam] = []
    for length in range(1, limit + 1):
        penalty = length**request.length_penalty
        running: list[tuple[int, Beam]] = []
        for rank, (score, row, token) in enumerate(_candidates(runner, features, beams, width)):
            tokens = (*beams[row].tokens, token)
            if token not in request.stop_tokens:
                running.append((row, Beam(tokens=tokens, score=score)))
            elif rank < width:
                finished.append(Beam(tokens=tokens, score=score / penalty))
        running = running[:width]
        finished = sorted(finished, key=lambda beam: -beam.score)[:width]
        best = running[0][1].score / penalty if running else -float("inf")
        if len(finished) == width and finished[-1].score >= best:
            break
        if length == limit:
            finished += [
                Beam(tokens=beam.tokens, score=beam.score / penalty) for _, beam in running
            ]
            break
        yield
        position = num_prompt + length - 1
        runner.states.reorder([row for row, _ in running], position)
        beams = [beam for _, beam in running]
        features = runner.decode([beam.tokens[-1] for beam in beams], [position] * len(beams))[:, 0]
    return sorted(finished, key=lambda beam: -beam.score)[:width]


def _candidates(
    runner: ModelRunner, features: Tensor, beams: list[Beam], width: int
) -> list[tuple[float, int, int]]:
    """Return the 2 * width best extensions of the beams by one token.

    Returns:
        Log-probability of the extended beam, row of the beam, and token.

    Raises:
        MegatronError: the logits are NaN or infinite.
    """

    def best_extensions() -> list[tuple[float, int, int]]:
        logits = runner.logits(features)
        scores_b1 = to_device([[beam.score] for beam in beams], runner.device)
        sums_bv = logits.log_softmax(-1) + scores_b1
        best = sums_bv.flatten().topk(min(2 * width, sums_bv.numel()))
        is_finite = logits.isfinite().all().expand_as(best.values)
        parts = is_finite, best.values, best.indices
        found = torch.stack([part.double() for part in parts], 1).tolist()  # the only sync
        if not all(is_finite for is_finite, _, _ in found):
            return []
        return [(score, *divmod(int(index), sums_bv.size(1))) for _, score, index in found]

    if found := runner.run_on_last_stage(best_extensions):
        return found
    raise runner.nonfinite_logits_error()
