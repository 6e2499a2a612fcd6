"""Processes that do not find each other say where they look, and what to look at."""

import pytest
import torch.distributed as dist

from megatron.engine import distributed
from megatron.errors import TrainingError
from megatron.training.environment import meeting_place


@pytest.fixture
def place(monkeypatch):
    """Where processes meet by what the environment says."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "_SILENCE_S", 0.1)
    return meeting_place()


def test_a_meeting_that_fails_says_where_it_was_and_what_to_look_at(place, told):
    with pytest.raises(TrainingError) as error, distributed.meeting(place, 2):
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=distributed.timedelta(seconds=1))
    assert "waiting at 127.0.0.1:0 until all 2 processes have come" in told
    message = str(error.value)
    assert message.startswith("the 2 processes have not met at 127.0.0.1:0 (Timed out after ")
    assert "1/2 clients joined" in message
    assert "GLOO_SOCKET_IFNAME" in message


def test_a_meeting_that_is_done_says_nothing(place, told):
    with distributed.meeting(place, 2):
        pass
    distributed.threading.Event().wait(0.3)
    assert told == []
