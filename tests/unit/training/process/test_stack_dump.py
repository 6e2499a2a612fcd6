"""Stacks of hung ranks, and the report on them."""

import sys
import threading
import time

import torch
from tiny import Shards, tiny_spec

from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.parts import LayerParts
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.training.process.stack_dump import (
    group_lines,
    place_of,
    read_places,
    spans,
    take_stacks,
    write_stacks,
)


def test_ranks_at_one_place_are_one_line_and_the_fewest_come_first():
    places = {0: "all_reduce (a.py:1) of block 4", 1: "read (b.py:2)"}
    places |= dict.fromkeys((2, 3), places[0])
    assert group_lines(places, 5) == [
        "1 rank (1) in read (b.py:2)",
        "1 rank (4) gave no answer: stopped, gone, or inside compiled code that keeps Python's lock",
        "3 ranks (0, 2-3) in all_reduce (a.py:1) of block 4",
    ]


def test_neighbours_are_spans():
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def place_once(thread, is_there):
    """Return where a thread is as soon as that is what is waited for, or where it is at last."""
    give_up_at = time.monotonic() + 60
    while True:
        where = place_of(sys._current_frames()[thread.ident])
        if is_there(where) or time.monotonic() > give_up_at:
            return where
        time.sleep(0.001)


class Stuck(torch.nn.Module):
    """Waits in compiled code until somebody lets it go."""

    def __init__(self):
        super().__init__()
        self.free = threading.Lock()
        self.free.acquire()

    def forward(self, x):
        self.free.acquire()
        return x


class Passes(torch.nn.Module):
    """Stands for attention and MLP."""

    def forward(self, x, *others, **options):
        return x, None


def test_a_thread_in_compiled_code_has_a_place_and_a_block():
    stuck = Stuck()
    spec = tiny_spec()
    layer = ParallelTransformerLayerPipe(
        spec,
        LayerParts(group=Shards(0, 1), rng=None, core_attention=core_attention_of(spec)),
        number=4,
    )
    layer.input_layernorm = stuck
    layer.self_attention = layer.mlp = Passes()
    thread = threading.Thread(target=layer, args=(LayerInput(torch.zeros(6, 1, 8)),), daemon=True)
    thread.start()
    line = Stuck.forward.__code__.co_firstlineno + 1
    expected = f"forward (tests/unit/training/process/test_stack_dump.py:{line}) of block 4"
    where = place_once(thread, lambda where: where == expected)
    stuck.free.release()
    thread.join(60)
    assert where == expected


def test_a_call_of_a_library_is_named_with_the_line_of_ours_that_led_there():
    waiting = threading.Event()
    thread = threading.Thread(target=lambda: waiting.wait(60), daemon=True, name="waiter")
    thread.start()
    where = place_once(thread, lambda where: where.startswith("wait "))
    waiting.set()
    assert where.startswith("wait (tests/unit/training/process/test_stack_dump.py:")


def test_stacks_are_written_and_read(tmp_path):
    done = []

    def take():
        done.append(take_stacks(rank=2, host="node", pid=1, stage="step 7"))

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    write_stacks(done[0], tmp_path / "hang")
    # The main thread waits for that one.
    assert list(read_places(tmp_path / "hang")) == [2]
    assert "test_stack_dump.py" in read_places(tmp_path / "hang")[2]
    assert any("MainThread" in name for name in done[0].threads)
