"""What a step that is taken again is compared with, and which samples it passes over."""

from problems import problem

from megatron.common.errors import TrainingError
from megatron.training.loop.journal import Journal
from megatron.training.replay import recorded_step

STEP = {
    **{"first_sample": 0, "samples": 4, "tokens": 32, "seq_length": 8, "learning_rate": 0.1},
    **{"loss_scale": 1.0, "skipped": False, "seconds": 0.5},
}


def test_spikes_are_those_of_the_attempt_that_stands(tmp_path):
    journal = Journal(tmp_path)
    journal.start(0, {})
    rollback = {"why": "loss 9", "passed_over": (8, 8)}
    journal.write("rollback", {**rollback, "iteration": 6, "spike": 8, "all_passed_over": [(8, 8)]})
    # Back to before the first one, which is passed over all the same.
    journal.write(
        "rollback", {**rollback, "iteration": 4, "spike": 9, "all_passed_over": [(8, 8), (9, 9)]}
    )
    for loss, iteration in enumerate((5, 10), 1):
        journal.write("step", STEP | {"iteration": iteration, "lm_loss": loss})
    record, spikes = recorded_step(tmp_path, 10)
    assert record["lm_loss"] == 2
    assert spikes == ((8, 8), (9, 9))
    with problem("--replay-step 9 … --load", TrainingError):
        recorded_step(tmp_path, 9)
    # Started once more from before all of that.
    journal.start(2, {})
    journal.write("step", STEP | {"iteration": 3, "lm_loss": 3})
    assert recorded_step(tmp_path, 3)[1] == ()
