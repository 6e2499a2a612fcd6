"""The log line that tools parse."""

import math

import pytest

from megatron.training.telemetry.report import Interval

INTERVAL = {
    "iteration": 4710,
    "train_iters": 115311,
    "consumed_samples": 6031872,
    "consumed_tokens": 12353273856,
    "iteration_ms": 104123.46,
    "learning_rate": 5.99e-5,
    "global_batch_size": 2048,
    "lm_loss": 2.4971234,
    "loss_scale": 65536.0,
    "grad_norm": 0.20349,
    "measures": {},
    "skipped_iterations": 1,
    "nan_iterations": 0,
    "samples_per_second": 19.668954,
    "tflops": 149.504,
    "eta_s": 97_262.4,
}


@pytest.mark.parametrize(
    ("changes", "with_loss_scale", "line"),
    [
        (
            {},
            True,
            " iteration     4710/  115311 | consumed samples:      6031872 | "
            "consumed tokens:  12353273856 | elapsed time per iteration (ms): 104123.5 | "
            "learning rate: 5.990E-05 | global batch size:  2048 | lm loss: 2.497123E+00 | "
            "loss scale: 65536.0 | grad norm: 0.203 | number of skipped iterations:   1 | "
            "number of nan iterations:   0 | samples per second: 19.669 | TFLOPs: 149.50 | "
            "done: 4.1% | ETA: 1 day, 3:01:02 |",
        ),
        (
            {"grad_norm": None, "decoupled_learning_rate": 1.5e-5, "skipped_iterations": 0},
            False,
            " iteration     4710/  115311 | consumed samples:      6031872 | "
            "consumed tokens:  12353273856 | elapsed time per iteration (ms): 104123.5 | "
            "learning rate: 5.990E-05 | decoupled learning rate: 1.500E-05 | "
            "global batch size:  2048 | lm loss: 2.497123E+00 | "
            "number of skipped iterations:   0 | number of nan iterations:   0 | "
            "samples per second: 19.669 | TFLOPs: 149.50 | done: 4.1% | ETA: 1 day, 3:01:02 |",
        ),
        (
            {"grad_norm": None, "lm_loss": math.nan, "nan_iterations": 10, "eta_s": 0.0},
            False,
            " iteration     4710/  115311 | consumed samples:      6031872 | "
            "consumed tokens:  12353273856 | elapsed time per iteration (ms): 104123.5 | "
            "learning rate: 5.990E-05 | global batch size:  2048 | lm loss: NAN | "
            "number of skipped iterations:   1 | number of nan iterations:  10 | "
            "samples per second: 19.669 | TFLOPs: 149.50 | done: 4.1% | ETA: 0:00:00 |",
        ),
    ],
    ids=["fp16", "decoupled rate", "without loss scale, norm and finite loss"],
)
def test_log_line(changes, with_loss_scale, line):
    assert Interval(**(INTERVAL | changes)).line(with_loss_scale=with_loss_scale) == line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"skipped_iterations": 0},
            "4710/115311 | loss 2.4971 | lr 5.99e-5 | norm 0.203 | 19.7 samples/s | ETA 1d 3h",
        ),
        (
            {"grad_norm": None, "nan_iterations": 2, "eta_s": 62.0},
            "4710/115311 | loss 2.4971 | lr 5.99e-5 | 19.7 samples/s | ETA 1m 2s | skipped 1 | NaN 2",
        ),
    ],
)
def test_the_line_for_a_terminal(changes, line):
    assert Interval(**(INTERVAL | changes)).compact_line() == line


def test_the_line_for_a_terminal_fits_it():
    assert len(Interval(**(INTERVAL | {"skipped_iterations": 0})).compact_line()) <= 80
