"""What is saved, decided: --save and --save-interval need not come together."""

from problems import problem
from tiny import tiny_plan


def test_without_an_interval_the_end_of_the_run_is_saved_and_a_notice_says_so():
    decided = tiny_plan("--save", "run")
    assert (decided.checkpoint.save, decided.checkpoint.interval) == ("run", 0)
    (notice,) = decided.notices
    assert "--save run without --save-interval" in notice


def test_an_interval_without_a_directory_is_a_notice():
    decided = tiny_plan("--save-interval", "500")
    assert not decided.checkpoint.save
    (notice,) = decided.notices
    assert "--save-interval 500 has no effect without --save" in notice


def test_going_back_behind_a_spike_needs_an_interval():
    with problem("--spike-policy needs --save-interval"):
        tiny_plan("--save", "run", "--spike-policy", "norm=3")
