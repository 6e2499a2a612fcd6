"""Distributed checkpoints are read and written one parameter at a time, in the memory of one chunk."""

import tarfile
from math import prod
from pathlib import Path

import pytest
from peak_memory import PeakMemory

from megatron.checkpointing.megatron_lm.convert import Conversion, convert, find
from megatron.checkpointing.megatron_lm.distributed_files import read_stored
from megatron.config.config import Config

FILES = Path(__file__).resolve().parents[3] / "foreign"
VOCAB = 30
SMALL = 512
"""Bytes of tensors that are no parameters."""


def unpack(name, folder):
    kind, name = name.split("/")
    with tarfile.open(FILES / kind / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name / "iter_0000007"


def convert_to(output, source, **how):
    needed = {"micro_batch_size": 1, "lr": 1, "train_iters": 1, "data_path": ["none"]}
    needed["true_vocab_size"] = VOCAB
    conversion = Conversion(source=source, output=output, flags=("", ""), **how)
    list(convert(conversion, lambda found: Config.of(**{**found, **needed})))
    return output


def size_of(shape):
    """Bytes of a tensor in fp32."""
    return 4 * prod(shape)


def test_a_tensor_is_loaded_in_the_memory_of_one_chunk_more(tmp_path):
    tensors = read_stored(unpack("torch_dist/experts", tmp_path)).tensors
    stacked = tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    chunk = max(size_of(chunk.shape) for chunk in stacked.chunks)
    layer = stacked.entry(1)
    assert size_of(layer.shape) == 8 * chunk and len(stacked.chunks) == 16
    with PeakMemory() as memory:
        layer.load()
    assert size_of(layer.shape) < memory.peak <= size_of(layer.shape) + chunk


@pytest.mark.parametrize("name", ["torch_dist/llama", "torch_dist/experts", "trained/gpt"])
def test_a_checkpoint_is_converted_in_the_memory_of_one_parameter(name, group, tmp_path):
    source = unpack(name, tmp_path)
    found = find(source, None).checkpoint.parameters
    sizes = [sum(size_of(t.shape) for t in found[n].tensors.values()) for n in found]
    # The parameter with its states, and two copies while its rows are put in another order.
    limit = 3 * max(sizes) + SMALL
    assert limit < sum(sizes)
    with PeakMemory() as memory:
        own = convert_to(tmp_path / "own", source)
    assert max(sizes) <= memory.peak <= limit
    with PeakMemory() as memory:
        convert_to(tmp_path / "written", own, saver="megatron", distributed=True)
    assert SMALL < memory.peak <= limit
