"""Core attention of a plugin with a KV cache: decode steps call it as prefill does."""

import torch
from torch.testing import assert_close

from megatron.inference.runner.decode_graphs import StepShape
from megatron.inference.runner.decode_states import DecodeStates
from megatron.inference.runner.passes import Decode, Prefill
from megatron.model.layers.attention_kernels import Mask, ScoreOptions, sdpa_attention

HOW = ScoreOptions(mask=Mask(), scale=0.5)
LENGTHS = (3, 5)


def states_of(*, rows):
    return DecodeStates(rows=rows, dtype=torch.float32, device=torch.device("cpu"))


def sigmoid_attention(query, key, value, how):
    """Weigh by sigmoids, which do not depend on the other keys: no softmax stands in for it."""
    seen = how.mask.visible(query.size(2), key.size(2), query.device)
    return (query @ key.mT * how.scale).sigmoid().masked_fill(~seen, 0) @ value


def test_decode_steps_attend_by_the_plugin():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 1, 6, 4)
    states = states_of(rows=2)
    core = states.attention(sigmoid_attention, groups=1, head_dim=4)
    states.reserve(8)
    states.start(Prefill(0, (6, 6)))
    core(query, key, value, HOW)
    # Each row goes on from a length of its own, with the token that stands there.
    states.start(
        Decode(torch.tensor(LENGTHS), StepShape(2, 3, 6), lengths=[p + 1 for p in LENGTHS])
    )
    news = [
        torch.stack([x[row, :, [p]] for row, p in enumerate(LENGTHS)]) for x in (query, key, value)
    ]
    expected = sigmoid_attention(query, key, value, HOW)
    assert_close(
        core(*news, HOW), torch.stack([expected[row, :, [p]] for row, p in enumerate(LENGTHS)])
    )


def test_values_may_be_a_part_of_the_cached_keys():
    torch.manual_seed(0)
    query, latents = torch.randn(2, 4, 6, 5), torch.randn(2, 1, 6, 5)
    cache = states_of(rows=2)
    core = cache.token_cache(groups=1, widths=(5,))
    cache.reserve(8)
    cache.start(Prefill(0, (6, 6)))
    core.store(latents)
    assert not core.attends_to_cache
    expected = sdpa_attention(query, latents, latents[..., :3], HOW)
    for positions in (LENGTHS, (4, 4)):
        shape = StepShape(2, min(positions), max(positions) + 1)
        cache.start(Decode(torch.tensor(positions), shape))
        now = [
            torch.stack([x[i, :, [p]] for i, p in enumerate(positions)]) for x in (query, latents)
        ]
        core.store(now[1])
        found = core.attend(now[0], HOW, value_width=3)
        assert_close(found, torch.stack([expected[i, :, [p]] for i, p in enumerate(positions)]))
