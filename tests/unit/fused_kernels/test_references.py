"""The reference of every operation against its formula in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_checks import BY_COLUMNS, COLUMNS, DTYPES, check_dropout

from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.fused_kernels.reference.softmax import scaled_causal_softmax, scaled_masked_softmax

WIDE = replace(
    REFERENCE,
    scaled_causal_softmax=partial(scaled_causal_softmax, in_fp32=True),
    scaled_masked_softmax=partial(scaled_masked_softmax, in_fp32=True),
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", BY_COLUMNS, ids=lambda check: check.__name__)
def test_reference_is_its_formula(check, dtype):
    for columns in COLUMNS:
        check(WIDE, CPU, dtype, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_of_the_reference(dtype):
    check_dropout(REFERENCE, CPU, dtype)
