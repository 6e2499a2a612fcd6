"""Rotary frequencies of heads of a usual size against those of transformers."""

import pytest
import torch
from architectures import THEIRS
from families import spec_of
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.model.layers.positions import rotary_frequencies

CASES = ["llama 3.1", "llama, other constants", "llama, yarn", "qwen3, yarn of other constants"]


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers(case, tmp_path):
    config = type(THEIRS[case])(**{**THEIRS[case].to_dict(), "head_dim": 128})
    kind = config.rope_parameters["rope_type"]
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    positions = spec_of(config, tmp_path)[1].positions
    found = rotary_frequencies(positions, torch.device("cpu"))
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-5)
    assert positions.rope_attention_factor == pytest.approx(factor)
