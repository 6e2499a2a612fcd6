"""What tokens see and how much they count, against the definitions written out token by token."""

from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import gpt_steps
from tiny import tiny_objective, tiny_spec

from megatron.common.registry import OBJECTIVES
from megatron.config.data.masks import MaskPlan
from megatron.data.datasets.views import PrefixDataset
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.loss import num_expected_targets, position_weights
from megatron.objectives.gpt import SPAN_FIELDS
from megatron.objectives.multitask import pair_batch
from megatron.objectives.prefix_lm import PrefixLM, prefix_batch
from megatron.objectives.sft import chat_batch
from megatron.tensor_parallel.rng import OrdinaryStream

EOD = 0
MASKS = st.builds(
    MaskPlan,
    reset_positions=st.booleans(),
    isolate_documents=st.booleans(),
    mask_loss=st.booleans(),
)


@cache
def objective(name, *flags):
    return tiny_objective(name, *flags)


class Samples:
    def __init__(self, rows):
        self.rows = np.array(rows)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"tokens": self.rows[i]}


def seen(spans_s2, s):
    """Return which positions each token sees, as sets."""
    return [set(range(first, stop)) for first, stop in spans_s2.tolist()][:s]


def prefix_rows(tokens, masks, seed):
    dataset = PrefixDataset(
        Samples([tokens]), eod=EOD if masks.isolate_documents else None, seed=seed
    )
    return {name: torch.from_numpy(array)[None] for name, array in dataset[0].items()}


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=16),
    MASKS,
    st.integers(0, 2**32),
    st.booleans(),
    st.booleans(),
)
def test_a_prefix_is_seen_as_a_whole_and_the_rest_from_left_to_right(
    tokens, masks, seed, targets_only, reweights
):
    flags = ["--loss-on-targets-only"] * targets_only
    flags += ["--reweight-loss-based-on-position-frequency"] * reweights
    rows = prefix_rows(tokens, masks, seed)
    batch = prefix_batch(**rows, masks=masks, eod=EOD, objective=objective("prefix-lm", *flags))
    inputs, positions, labels, weights, spans = (batch[name] for name in SPAN_FIELDS)
    s, ends = len(tokens) - 1, rows["prefix_ends"][0].tolist()
    assert (inputs[0].tolist(), labels[0].tolist()) == (tokens[:-1], tokens[1:])
    document = [tokens[:i].count(EOD) for i in range(s)]
    for q in range(s):
        same = [k for k in range(s) if not masks.isolate_documents or document[k] == document[q]]
        assert seen(spans[0], s)[q] == {k for k in same if k <= q or (q < ends[q] and k < ends[q])}
        counts = not (targets_only and q < ends[q] - 1)
        counts = counts and not (masks.mask_loss and tokens[q] == EOD)
        weight = 2 * (s - q) / (s + 1) if reweights else 1
        assert weights[0, q].item() == pytest.approx(weight * counts)
        start = max((k + 1 for k in range(q) if tokens[k] == EOD), default=0)
        assert positions[0, q] == (q - start if masks.reset_positions else q)


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4)


def pair_rows(pairs, length):
    """Return tokens 1, 2 and so on in pairs of (inputs, targets), then padding, as a batch of one."""
    row, place = torch.zeros(3, length, dtype=torch.int64), 0
    for number, (inputs, targets) in enumerate(pairs, start=1):
        stop = place + inputs + targets
        row[:, place:stop] = torch.stack(
            [
                torch.arange(place, stop) + 1,
                torch.full((stop - place,), number),
                torch.full((stop - place,), place + inputs),
            ]
        )
        place = stop
    return dict(zip(("tokens", "text_ids", "target_starts"), row[:, None], strict=True))


@given(PAIRS, st.integers(0, 4), st.booleans(), st.booleans(), st.booleans())
def test_pairs_do_not_see_each_other_and_targets_count(pairs, padding, sees, equal, reset):
    pairs = [pair for pair in pairs if sum(pair)] or [(1, 1)]
    number, is_input = [], []
    for i, (inputs, targets) in enumerate(pairs):
        number += [i] * (inputs + targets)
        is_input += [True] * inputs + [False] * targets
    number += [None] * (padding + 1)
    is_input += [False] * (padding + 1)
    flags = ["--prefixlm"] * sees + ["--norm-target-loss"] * equal
    masks = MaskPlan(reset_positions=reset, isolate_documents=False, mask_loss=False)
    batch = pair_batch(
        **pair_rows(pairs, len(number)), masks=masks, objective=objective("multitask", *flags)
    )
    _, positions, _, weights, spans = (batch[name] for name in SPAN_FIELDS)
    s = len(number) - 1
    counts = [
        number[q] is not None and number[q + 1] == number[q] and not is_input[q + 1]
        for q in range(s)
    ]
    for q in range(s):
        same = [k for k in range(s) if number[k] == number[q]]
        both = [k for k in same if sees and is_input[q] and is_input[k]]
        assert seen(spans[0], s)[q] == {k for k in same if k <= q} | set(both)
        in_target = sum(counts[k] for k in same) if equal else 1
        assert weights[0, q].item() == pytest.approx(counts[q] / max(1, in_target))
        assert positions[0, q] == (q - same[0] if reset else q)


CHATS = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=30)
@given(CHATS, st.integers(1, 4), st.booleans())
def test_conversations_do_not_see_each_other_and_answers_count(chats, padding, equal):
    number = [i for i, chat in enumerate(chats, start=1) for _ in chat] + [0] * padding
    answers = [counts for chat in chats for counts in chat] + [False] * padding
    rows = (
        torch.tensor([row], dtype=torch.int64)
        for row in (range(1, len(number) + 1), number, answers)
    )
    flags = ["--norm-target-loss"] * equal
    batch = chat_batch(*rows, PACKED, None, objective=objective("sft", *flags))
    _, positions, _, weights, spans = (batch[name] for name in SPAN_FIELDS)
    s = len(number) - 1
    counted = [q for q in range(s) if answers[q + 1] and number[q + 1] == number[q]]
    for q in range(s):
        assert seen(spans[0], s)[q] == {k for k in range(q + 1) if number[k] == number[q]}
        same = sum(number[k] == number[q] for k in counted) if equal else 1
        assert weights[0, q].item() == pytest.approx((q in counted) / max(1, same))
    assert positions[0].tolist() == [*range(s)]


@pytest.mark.parametrize("targets_only", [False, True])
@pytest.mark.parametrize("reweights", [False, True])
def test_the_divisor_is_the_mean_sum_of_weights_over_all_prefixes(targets_only, reweights):
    s = 9
    weights = position_weights(s) if reweights else torch.ones(s, dtype=torch.float64)
    sums = [weights[(length - 1 if targets_only else 0) :].sum() for length in range(1, s + 1)]
    found = num_expected_targets(s, targets_only=targets_only, reweights=reweights)
    assert found == pytest.approx(float(sum(sums)) / s)
    if not reweights:
        assert found == ((s + 1) / 2 if targets_only else s)


def test_the_prefix_loss_is_the_weighted_sum_over_the_divisor(group):
    plan = objective("prefix-lm", "--loss-on-targets-only")
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    weights = torch.tensor([[0.0, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
    each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    loss = PrefixLM().loss(plan)(group)(logits, {"labels": labels, "loss_mask": weights})
    torch.testing.assert_close(loss, (each * weights).sum() / (2 * 3))


def logits_of(model, rows, masks, name, *flags):
    plan = objective(name, *flags)
    return model(OBJECTIVES.get(name)().collate(plan, masks, EOD)(**rows))[0]


@pytest.fixture
def changed_by(group):
    """Return a function that tells at which positions logits change with the token at a place."""
    model = SequentialModel(
        gpt_steps(
            tiny_spec(seq_length=8, max_position_embeddings=8),
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
        )
    )
    initialise(model, seed=1, std=0.5, num_layers=2)
    model.eval()

    def changed(rows, place, masks, name, *flags):
        other = rows | {"tokens": rows["tokens"].clone()}
        other["tokens"][0, place] = 10
        with torch.no_grad():
            logits = [logits_of(model, r, masks, name, *flags) for r in (rows, other)]
        return [i for i in range(len(logits[0])) if not torch.equal(logits[0][i], logits[1][i])]

    return changed


PACKED = MaskPlan(reset_positions=False, isolate_documents=False, mask_loss=False)
APART = MaskPlan(reset_positions=False, isolate_documents=True, mask_loss=False)


def of_prefixes(tokens, ends):
    return {"tokens": torch.tensor([tokens]), "prefix_ends": torch.tensor([ends])}


def test_a_token_of_a_prefix_changes_what_is_before_it(changed_by):
    rows = of_prefixes([1, 2, 3, 4, 5, 6, 7, 8, 9], [4] * 8 + [0])
    changed = partial(changed_by, rows, masks=PACKED, name="prefix-lm")
    assert changed(3) == [*range(8)]
    assert changed(4) == [4, 5, 6, 7]


def test_a_prefix_is_seen_in_its_document_alone(changed_by):
    rows = of_prefixes([1, 2, 3, EOD, 5, 6, 7, 8, 9], [2] * 4 + [7] * 4 + [0])
    changed = partial(changed_by, rows, masks=APART, name="prefix-lm")
    assert [changed(place) for place in (1, 2, 6, 7)] == [[0, 1, 2, 3], [2, 3], [4, 5, 6, 7], [7]]


def test_an_input_is_seen_by_its_target_and_both_ways_if_asked(changed_by):
    rows = pair_rows([(2, 1), (3, 1)], 9)
    changed = partial(changed_by, rows, masks=PACKED, name="multitask")
    assert [changed(place) for place in (1, 2, 5, 7)] == [[1, 2], [2], [5, 6], [7]]
    prefixlm = [changed_by(rows, place, PACKED, "multitask", "--prefixlm") for place in (1, 2, 5)]
    assert prefixlm == [[0, 1, 2], [2], [3, 4, 5, 6]]
