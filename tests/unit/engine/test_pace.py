"""What each rank does before it meets others, measured without waiting for its device."""

from itertools import count

import pytest

from megatron.engine.deepspeed.timers import Pace, Timers


class StreamEvent:
    """A point of a device's time, which passes 5 ms between two points."""

    made, waited = count(), 0

    def record(self):
        self.at = next(StreamEvent.made)

    def synchronize(self):
        StreamEvent.waited += 1

    def elapsed_time(self, later):
        return 5.0 * (later.at - self.at)


def step(timers, clock):
    for part in ("batch-generator", "forward-compute", "backward-compute", "optimizer"):
        with timers.part(part):
            clock.pass_time(1)


def test_data_is_timed_by_the_host_and_forward_passes_by_the_device(clock):
    timers = Timers(pace=Pace(StreamEvent))
    before = StreamEvent.waited
    for _ in range(3):
        step(timers, clock)
    assert StreamEvent.waited == before  # no wait inside a step
    assert timers.pace.take() == {"batch-generator": 3.0, "forward-compute": pytest.approx(0.015)}
    assert timers.pace.take() == {"batch-generator": 0.0, "forward-compute": 0.0}
    assert timers.take() == {}


def test_evaluation_is_no_part_of_steps(clock):
    timers = Timers(2, pace=Pace())
    assert timers.is_on
    with timers.pause():
        step(timers, clock)
    assert sum(timers.pace.take().values()) == 0
    assert timers.take() == {}
    step(timers, clock)
    assert timers.pace.take()["forward-compute"] > 0
    assert len(timers.take()) == 4


def test_without_a_pace_nothing_more_is_on():
    assert not Timers().is_on
    assert Timers(pace=Pace()).is_on
