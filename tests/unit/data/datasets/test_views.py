"""Dataset wrappers of objectives: special tokens found by role; a missing one is an error."""

import numpy as np
import pytest
from tiny import tiny_config, tiny_objective

from megatron.common.errors import DataError
from megatron.config.data.masks import plan_masks
from megatron.data.datasets.datasets import view_of
from megatron.data.datasets.fim import fim_tokens
from megatron.data.sampling.provenance import Origin
from megatron.tokenizer.types.tokenizer import Tokenizer, Vocabulary

LETTERS = ["a", "b", "c"]


class Letters(Tokenizer):
    """A token for each letter, and named ones."""

    def __init__(self, *special, **roles):
        self.name = "letters"
        self.tokens = [*LETTERS, *special]
        self.vocab_size = len(self.tokens)
        self.special_ids = {role: self.tokens.index(text) for role, text in roles.items()}

    def encode(self, text):
        return [self.tokens.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(self.tokens[i] for i in ids)

    def vocabulary(self):
        return Vocabulary(self.tokens, "")


class Sample:
    def __len__(self):
        return 1

    def __getitem__(self, i):
        return {"tokens": np.array([0, 1, 2, 0, 1, 2])}

    def origin(self, i):
        return Origin("corpus", i, ())


FIM = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")


def plan_of(*flags, name="gpt"):
    return tiny_objective(name, "--fim-rate", "1", *flags)


def fim_of(*flags):
    return plan_of(*flags).fim


@pytest.mark.parametrize(
    "special",
    [
        ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"],
        ["<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"],
        ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"],
    ],
)
def test_special_tokens_are_found_in_their_usual_spellings(special):
    found = fim_tokens(fim_of(), Letters(*special, "end", eod="end"))
    assert (found.prefix, found.middle, found.suffix, found.pad, found.eod) == (3, 4, 5, 6, 7)
    assert found.split is None


def test_special_tokens_are_those_that_flags_name():
    flags = ["--fim-prefix-token", "x", "--fim-middle-token", "y", "--fim-suffix-token", "z"]
    flags += ["--fim-pad-token", "p", "--fim-split-sample", "f"]
    found = fim_tokens(fim_of(*flags), Letters("x", "y", "z", "p", "f", *FIM, "end", eod="end"))
    assert (found.prefix, found.middle, found.suffix, found.pad, found.split) == (3, 4, 5, 6, 7)


def test_padding_is_the_tokenizers_or_the_end():
    assert fim_tokens(fim_of(), Letters(*FIM, "end", "pad", eod="end", pad="pad")).pad == 7
    assert fim_tokens(fim_of(), Letters(*FIM, "end", eod="end")).pad == 6


def test_all_that_is_missing_is_reported():
    flags = ["--fim-middle-token", "mid", "--fim-split-sample", "file"]
    with pytest.raises(DataError) as raised:
        fim_tokens(fim_of(*flags), Letters("<fim_prefix>", "end", eod="end"))
    text = str(raised.value)
    assert (
        "tokenizer letters has no token mid (--fim-middle-token), no token <fim_suffix> or" in text
    )
    assert "no token file (--fim-split-sample)" in text
    assert "--fim-prefix-token" not in text


def test_each_objective_has_its_view():
    tokenizer, masks = Letters(*FIM, "end", eod="end"), plan_masks(tiny_config().masks)

    def sample(plan):
        view = view_of(plan, masks, tokenizer, seed=1)
        return view(Sample())[0] if view else None

    assert sample(plan_of())["tokens"][0] == 3
    assert sample(plan_of("--fim-rate", "0")) is None
    assert [*sample(plan_of(name="prefix-lm"))] == ["tokens", "prefix_ends"]
    assert sample(plan_of(name="multitask")) is None
