"""Recomputation changes no bit: losses, gradients and weights with dropout on, in every mode.

Neither does torch.compile as long as it only traces layers, and the loss.
"""

from functools import partial

import pytest
import torch
from engines import DOCUMENTS, trained
from ranks import outcomes_on_ranks, require_passed
from torch.testing import assert_close

TENSOR = ("--tensor-model-parallel-size", "2")
PIPELINE = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "4")
FLAGS = (
    *("--num-layers", "5", "--attention-dropout", "0.3", "--hidden-dropout", "0.3"),
    *("--optimizer", "sgd", "--weight-decay", "0"),
)
NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
FULL = ("--recompute-granularity", "full", "--recompute-method")
MODES = {
    "selective": ("--recompute-activations",),
    "one_by_one": ("--checkpoint-activations",),
    "in_pairs": (*FULL, "uniform", "--recompute-num-layers", "2"),
    "two_of_each_stage": (*FULL, "block", "--recompute-num-layers", "2"),
}
STORAGE = {
    "divided": ("--partition-activations",),
    "divided_in_cpu": ("--partition-activations", "--checkpoint-in-cpu"),
    "contiguous": ("--partition-activations", "--contigious-checkpointing"),
    "waiting": ("--synchronize-each-layer",),
}


def require_equal(flags, *modes):
    expected = trained(*FLAGS, *flags)
    for mode in modes:
        found = trained(*FLAGS, *flags, *mode)
        for name in expected:
            assert torch.equal(found[name], expected[name]), (mode, name)


def every_mode_is_bit_equal_over_tensor_ranks(rank):
    require_equal(TENSOR, *MODES.values())


def every_mode_is_bit_equal_over_stages(rank):
    require_equal(PIPELINE, *MODES.values())


def every_mode_is_bit_equal_with_zero_3(rank):
    require_equal(("--zero-stage", "3"), *MODES.values())


def layers_and_loss_are_compiled_over_ranks(rank):
    compiled = partial(trained, "--compile", compile_backend="aot_eager")
    for flags in (
        (*TENSOR, "--attention-dropout", "0", "--hidden-dropout", "0.3"),
        (*TENSOR, "--sequence-parallel", "--attention-dropout", "0", *MODES["in_pairs"]),
        ("--ds-sequence-parallel-size", "2", *NO_DROPOUT),
        (*PIPELINE, *NO_DROPOUT, *DOCUMENTS, *MODES["two_of_each_stage"]),
    ):
        torch.compiler.reset()
        expected, found = trained(*flags), compiled(*flags)
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close(
                found[name], expected[name], msg=lambda text, n=(flags, name): f"{n}: {text}"
            )


def a_compiled_layer_draws_the_same_dropout_again(rank):
    compiled = partial(trained, *FLAGS, "--compile", compile_backend="aot_eager")
    torch.compiler.reset()
    expected, found = compiled(), compiled(*MODES["one_by_one"])
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def however_it_is_stored_is_bit_equal(rank):
    modes = [("--checkpoint-activations", *storage) for storage in STORAGE.values()]
    require_equal(TENSOR, *modes[:3])


CHECKS = [
    every_mode_is_bit_equal_over_tensor_ranks,
    every_mode_is_bit_equal_over_stages,
    every_mode_is_bit_equal_with_zero_3,
    however_it_is_stored_is_bit_equal,
    layers_and_loss_are_compiled_over_ranks,
    a_compiled_layer_draws_the_same_dropout_again,
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_on_ranks(2, CHECKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check, outcomes):
    require_passed(check, outcomes)
