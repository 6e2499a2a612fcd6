"""Extensions: several tokens of each row behind cached ones are what one prefill makes of all of them."""

import random

import pytest
import torch
from stages import engine_of, random_model
from test_continuous_batching import NETWORKS, SIZES
from tiny import GPT_OSS, LATENT, tiny_plan, tiny_spec
from torch.testing import assert_close

from megatron.common.registry import ATTENTIONS
from megatron.model.layers.attention_kernels import sdpa_attention

FROM_FLAGS = {
    "latent attention": LATENT,
    "gpt-oss": GPT_OSS,
}
LONGEST = 14


def spec_named(name):
    if name in NETWORKS:
        return tiny_spec(**(SIZES | NETWORKS[name]))
    positions = ("--max-position-embeddings", str(LONGEST), "--seq-length", str(LONGEST))
    return tiny_plan(*FROM_FLAGS[name], *positions, vocab_size=29).model


def cuts_of(draw, length):
    """Return where a text is cut into pieces, from 0 to its length."""
    inner = draw.sample(range(1, length), draw.randint(0, min(4, length - 1)))
    return [0, *sorted(inner), length]


def in_pieces(runner, texts, cuts, first):
    """Return the hidden states of each text, run piece by piece in the rows from `first` on."""
    found = [[] for _ in texts]
    rows = range(len(texts))
    for number in range(max(map(len, cuts)) - 1):
        # A text with fewer pieces computes its last token again.
        bounds = [
            (one[number], one[number + 1]) if number + 1 < len(one) else (one[-1] - 1, one[-1])
            for one in cuts
        ]
        pieces = [texts[row][slice(*bounds[row])] for row in rows]
        starts = [start for start, _ in bounds]
        if any(starts):
            hidden = runner.extend(pieces, starts, first)
        else:
            hidden = runner.prefill(pieces, [*map(len, pieces)], first)
        for row in rows:
            if number + 1 < len(cuts[row]):
                found[row].append(hidden[row, : len(pieces[row])])
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("name", [*NETWORKS, *FROM_FLAGS])
@torch.inference_mode()
def test_pieces_of_a_text_are_computed_as_the_whole(group, name):
    spec, draw = spec_named(name), random.Random(5)
    runner = engine_of(random_model(group, spec), spec, rows=6).runner
    assert not runner.no_extension
    for rows in (1, 2, 3, 4):
        first = draw.randint(0, 6 - rows)
        texts = [[draw.randrange(29) for _ in range(draw.randint(2, LONGEST))] for _ in range(rows)]
        expected = runner.prefill(texts, [*map(len, texts)])
        expected = [expected[row, : len(text)] for row, text in enumerate(texts)]
        found = in_pieces(runner, texts, [cuts_of(draw, len(text)) for text in texts], first)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_a_plugins_attention_gets_the_cached_keys_of_each_row(group, monkeypatch):
    calls = []

    def counted(query, key, value, how):
        calls.append((query.size(2), key.size(2)))
        return sdpa_attention(query, key, value, how)

    monkeypatch.setattr(ATTENTIONS, "get", lambda name, *own: counted)
    spec = tiny_spec(**SIZES | {"attention": "counted", "num_layers": 1})
    model = random_model(group, spec)
    runner = engine_of(model, spec).runner
    texts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    expected = runner.prefill(texts, [5, 3])
    calls.clear()
    found = in_pieces(runner, texts, [[0, 2, 5], [0, 2, 3]], 1)
    assert calls == [(2, 2), (3, 5), (1, 3)]
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1, :3])
