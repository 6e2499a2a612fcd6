"""Fill-in-the-middle: no token is lost, no length changes, and parts stand in their order."""

from collections import Counter
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data.objective import FimPlan
from megatron.data.datasets.fim import FimDataset, FimTokens
from megatron.data.sampling.provenance import Origin
from megatron.data.sampling.sample_rng import sample_rng

SPECIAL = FimTokens(prefix=300, middle=301, suffix=302, pad=303, eod=304, split=None)
MARKS = (SPECIAL.prefix, SPECIAL.middle, SPECIAL.suffix)
PLAN = FimPlan(
    rate=1.0,
    spm_rate=0.5,
    split_token="",
    fragment_rate=0.5,
    skipped_prefix="",
    cut="tokens",
    tokens={},
)
TEXTS = st.lists(st.sampled_from([97, 98, 99, SPECIAL.eod]), min_size=2, max_size=30)
SEEDS = st.integers(0, 2**32 - 1)


class One:
    """A data set whose samples are all the same."""

    def __init__(self, tokens):
        self.tokens = np.array(tokens)

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        return {"tokens": self.tokens}

    def origin(self, i):
        return Origin("corpus", i, ())


def encode(text):
    return list(text.encode())


def decode(ids):
    return bytes(ids).decode(errors="replace")


def fim(tokens, seed=0, *, special=SPECIAL, **changes):
    return FimDataset(
        One(tokens),
        plan=replace(PLAN, **changes),
        tokens=special,
        seed=seed,
        encode=encode,
        decode=decode,
    )


def restored(tokens, mark=SPECIAL.eod):
    """Return `tokens` with the parts of each document, ended by `mark`, put back in place."""
    found, document = [], []
    for token in [*tokens, None]:
        if token not in (mark, None):
            document.append(token)
            continue
        found += _restored_document(document) + ([mark] if token == mark else [])
        document = []
    return found


def _restored_document(tokens):
    if tokens[:1] != [SPECIAL.prefix]:
        return tokens
    if tokens[1:2] == [SPECIAL.suffix]:  # suffix first: its middle is behind the prefix already
        position = tokens.index(SPECIAL.middle)
        return tokens[position + 1 :] + tokens[2:position]
    suffix, middle = tokens.index(SPECIAL.suffix), tokens.index(SPECIAL.middle)
    return tokens[1:suffix] + tokens[middle + 1 :] + tokens[suffix + 1 : middle]


@given(TEXTS, SEEDS, st.sampled_from(["tokens", "characters"]), st.sampled_from([0.0, 0.5, 1.0]))
def test_every_document_can_be_put_back(tokens, seed, cut, spm_rate):
    dataset = fim(tokens, seed, cut=cut, spm_rate=spm_rate)
    found = dataset.rearrange(np.array(tokens), sample_rng(seed, 0)).tolist()
    assert restored(found) == tokens
    assert Counter(t for t in found if t not in MARKS) == Counter(tokens)
    documents = sum(1 for is_end, _ in groupby(tokens, SPECIAL.eod.__eq__) if not is_end)
    assert [found.count(mark) for mark in MARKS] == [documents] * 3


@given(TEXTS, SEEDS, st.floats(0, 1))
def test_the_length_stays_and_what_is_too_much_is_cut_off_the_end(tokens, seed, rate):
    dataset = fim(tokens, seed, rate=rate)
    full = dataset.rearrange(np.array(tokens), sample_rng(seed, 5))
    assert dataset[5]["tokens"].tolist() == full[: len(tokens)].tolist()
    assert dataset[5]["tokens"].dtype == np.int64


def test_rate_0_changes_nothing_and_rate_1_everything():
    tokens = [97, 98, 99, SPECIAL.eod, 99, 98]
    assert all(fim(tokens, rate=0.0)[i]["tokens"].tolist() == tokens for i in range(50))
    assert all(fim(tokens, rate=1.0)[i]["tokens"][0] == SPECIAL.prefix for i in range(50))


def test_rates_are_kept():
    dataset = fim([97, 98, 99, 97, 98, 99, 97], rate=0.4, spm_rate=0.25)
    rows = [dataset[i]["tokens"].tolist() for i in range(1000)]
    changed = [row for row in rows if row[0] == SPECIAL.prefix]
    suffix_first = [row for row in changed if row[1] == SPECIAL.suffix]
    assert len(changed) == pytest.approx(400, abs=60)
    # A quarter by the rate, and an eighth of the others, whose prefix is empty: 1 - (7 / 8)^2.
    assert len(suffix_first) / len(changed) == pytest.approx(0.25 + 0.75 * 15 / 64, abs=0.1)


def test_a_sample_depends_on_the_seed_and_its_number_alone():
    tokens = list(range(40))
    rows = [fim(tokens, 1)[i]["tokens"].tolist() for i in range(20)]
    dataset = fim(tokens, 1)
    assert [dataset[i]["tokens"].tolist() for i in reversed(range(20))] == rows[::-1]
    assert [fim(tokens, 2)[i]["tokens"].tolist() for i in range(20)] != rows
    assert len({str(row) for row in rows}) > 10


def test_a_text_that_became_shorter_in_other_tokens_is_padded():
    dataset = FimDataset(
        One([97] * 12),
        plan=replace(PLAN, cut="characters"),
        tokens=SPECIAL,
        seed=0,
        encode=lambda text: encode(text.replace("aa", "b")),
        decode=decode,
    )
    row = dataset[0]["tokens"].tolist()
    assert len(row) == 12
    assert row[-1] == SPECIAL.pad
    assert row.count(97) + 2 * row.count(98) == 12


def test_half_a_character_is_not_cut_as_text():
    """Bytes that are no UTF-8 would not survive the way through text."""
    tokens = [0xC3, 0xA4, 0xC3]
    dataset = fim(tokens, cut="characters")
    for i in range(30):
        found = dataset.rearrange(np.array(tokens), sample_rng(0, i)).tolist()
        assert restored(found) == tokens


def test_characters_are_not_cut_within():
    tokens = encode("äöü")
    dataset = fim(tokens, cut="characters")
    for i in range(30):
        found = dataset.rearrange(np.array(tokens), sample_rng(0, i)).tolist()
        for part in _split_at(found, MARKS):
            bytes(part).decode()


def _split_at(tokens, marks):
    parts = [[]]
    for token in tokens:
        if token in marks:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def test_fragments_are_rearranged_apart_at_their_own_rate():
    split = replace(SPECIAL, split=305)
    tokens = [97, 98, 305, 99, 97, 305, 98, 99, SPECIAL.eod, 97, 98]
    none = fim(tokens, special=split, fragment_rate=0.0)
    every = fim(tokens, special=split, fragment_rate=1.0)
    for i in range(30):
        rng = sample_rng(0, i)
        found = none.rearrange(np.array(tokens), rng).tolist()
        # A document that has no fragments is rearranged at --fim-rate.
        assert (found[:9], found[9]) == (tokens[:9], SPECIAL.prefix)
        found = every.rearrange(np.array(tokens), sample_rng(0, i)).tolist()
        assert found.count(SPECIAL.prefix) == 4
        first = found[: found.index(SPECIAL.eod)]
        assert restored(first, mark=305) == tokens[:8]


def test_a_fragment_with_the_excepted_beginning_stays():
    dataset = fim([97, 98, SPECIAL.eod, 98, 97], skipped_prefix="ab")
    for i in range(20):
        row = dataset[i]["tokens"].tolist()
        assert row[:4] == [97, 98, SPECIAL.eod, SPECIAL.prefix]
