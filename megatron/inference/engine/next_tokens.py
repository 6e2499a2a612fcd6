"""Sample the next token of each sequence from hidden states: logits, processors, log-probabilities."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.inference.engine.logits_processor import process_logits
from megatron.inference.engine.sampling import mask_nonfinite, sample_tokens
from megatron.inference.engine.sequence import ActiveSequence
from megatron.inference.runner.device import to_device
from megatron.inference.runner.logprobs import TokenLogprob, logprob_columns, read_logprobs
from megatron.inference.runner.model_runner import ModelRunner


@torch.inference_mode()
def next_tokens(
    runner: ModelRunner,
    sequences: Sequence[ActiveSequence],
    features: Tensor,
    draws: Sequence[float],
) -> list[TokenLogprob | None]:
    """Sample the next token of each sequence; None where its logits are NaN or infinite.

    Shapes: features [b, h], the input of the head at the last position of each sequence.
    Communication: as `ModelRunner.logits`.
    """
    logits, is_finite_b1 = mask_nonfinite(runner.logits(features))
    requests = [one.request for one in sequences]
    scored = [i for i, one in enumerate(requests) if one.logprobs or one.top_logprobs]
    top = max((requests[i].top_logprobs for i in scored), default=0)

    def score(tokens_b: Tensor) -> Tensor:
        columns = [is_finite_b1]
        if scored:
            index = to_device(scored, logits.device)
            logprobs = logprob_columns(logits[index], tokens_b[index], top)
            table = logprobs.new_zeros(len(sequences), logprobs.size(1))
            columns.append(table.index_copy_(0, index, logprobs))
        return torch.cat(columns, 1)

    rows = sample_tokens(
        process_logits(logits, sequences),
        [one.sampling for one in requests],
        draws,
        [one.num_new for one in sequences],
        score,
    )
    found: list[TokenLogprob | None] = []
    for i, (token, is_finite, *columns) in enumerate(rows):
        new = TokenLogprob(token=int(token))
        if i in scored:
            new = read_logprobs(new.token, columns, requests[i].top_logprobs)
        found.append(new if is_finite else None)
    return found
