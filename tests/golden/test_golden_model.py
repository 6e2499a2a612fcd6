"""The network as files and tools see it: names, shapes, numbers of layers."""

import pytest
import torch
from golden_files import require_golden
from networks import gpt_steps
from tiny import Shards, tiny_spec

from megatron.model.layers.layer_list import Layer, SequentialModel
from megatron.tensor_parallel.rng import OrdinaryStream


def steps_of(count, *, mixed=False, **changes):
    return gpt_steps(
        tiny_spec(**changes), group=Shards(0, count), rng=OrdinaryStream(), mixed=mixed
    )


def test_state_dict():
    lines = []
    for count in (1, 2):
        with torch.device("meta"):
            model = SequentialModel(steps_of(count))
        lines.append(f"[tensor-parallel size {count}]")
        lines += [f"{name} {list(value.shape)}" for name, value in model.state_dict().items()]
    require_golden("state_dict.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "mixed"])
def test_the_list_is_numbered_like_the_layer_files_of_bloom(mixed):
    names = [
        s.cls.__name__ if isinstance(s, Layer) else s.__name__ for s in steps_of(1, mixed=mixed)
    ]
    assert names == [
        "take_tokens",
        "EmbeddingPipe",
        "to_sequence_first",
        "ParallelTransformerLayerPipe",
        "ParallelTransformerLayerPipe",
        "to_batch_first",
        "LayerNorm",
        "OutputEmbeddingPipe",
        *(["to_float32"] if mixed else []),
    ]


def test_embedding_and_head_are_one_weight():
    ties = {i: (s.tie.key, s.tie.weight) for i, s in enumerate(steps_of(1)) if getattr(s, "tie", 0)}
    assert ties == {
        1: ("embed", "word_embeddings.weight"),
        7: ("embed", "word_embeddings.weight"),
    }
