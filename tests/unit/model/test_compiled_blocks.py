"""Compiled transformer layers against the same layers that are not compiled."""

from shutil import which

import pytest
import torch
from compiled_networks import TRACED
from networks import gpt_steps
from problems import problem
from tiny import GEMMA_2, LLAMA, batch_of, tiny_spec
from torch._dynamo.utils import counters
from torch.testing import assert_close

from megatron.model.compiled_blocks import Compiler
from megatron.model.initialization import initialise
from megatron.model.layers.layer_list import SequentialModel
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.model.loss import next_token_loss
from megatron.tensor_parallel.rng import OrdinaryStream

GRAPHS = {
    "gpt": ({}, 1),
    "llama": (LLAMA | {"num_layers": 3, "head_dim": 6}, 1),
    "gemma_2, windows in every second layer": (
        GEMMA_2 | {"head_dim": 6, "query_key_layer_scaling": False},
        2,
    ),
    "alibi": ({"position_embedding": "alibi"}, 1),
    "lora": ({"lora_rank": 2, "lora_alpha": 4.0, "lora_target_modules": ("query_key_value",)}, 1),
}
"""Networks, and how many of their layers differ."""


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def model_of(group, *, compiler=None, **changes):
    spec = tiny_spec(init_std=0.3, **changes)
    model = SequentialModel(gpt_steps(spec, group=group, rng=OrdinaryStream(), mixed=False))
    initialise(model, seed=1, std=spec.init_std, num_layers=spec.num_layers)
    if compiler:
        compiler.compile_blocks(model)
    return model


def batch(seed=0, rows=3):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (rows, 7), generator=generator)
    positions = torch.arange(6).expand(rows, -1).contiguous()
    return batch_of(tokens[:, :-1], positions, labels=tokens[:, 1:], loss_mask=torch.ones(rows, 6))


def losses_of(model, loss, *, steps=3):
    """Return the losses of steps of gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in range(steps):
        given = batch(seed)
        value = loss(model(given), given)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("name", GRAPHS)
def test_layers_that_are_alike_share_one_graph(name, group):
    changes, kinds = GRAPHS[name]
    loss = next_token_loss(group, vocab_size=11)
    model, plain = model_of(group, compiler=TRACED, **changes), model_of(group, **changes)

    assert_close(losses_of(model, loss), losses_of(plain, loss))
    assert counters["stats"]["unique_graphs"] == kinds
    assert not counters["graph_break"]
    assert [*model.state_dict()] == [*plain.state_dict()]


def test_nothing_is_compiled_behind_the_first_step_and_evaluation(group):
    model, loss = model_of(group, compiler=TRACED), TRACED.compile_loss(next_token_loss(group))
    losses_of(model, loss, steps=1)
    with torch.no_grad():
        loss(model.eval()(batch()), batch())
    model.train()
    # Layers and loss, each with a gradient and without.
    assert counters["stats"]["unique_graphs"] == 4

    with torch._dynamo.config.patch(error_on_recompile=True):
        losses_of(model, loss)
        with torch.no_grad():
            loss(model.eval()(batch()), batch())
    assert counters["stats"]["unique_graphs"] == 4


def test_a_smaller_micro_batch_is_compiled_once_more(group):
    model = model_of(group, compiler=TRACED)
    for rows in (3, 2, 3, 2):
        model(batch(rows=rows))
    assert counters["stats"]["unique_graphs"] == 2


def test_a_layer_that_breaks_the_graph_is_refused(group):
    class Printing(ParallelTransformerLayerPipe):
        def forward(self, inputs):
            if inputs.hidden.sum() > 0:
                return super().forward(inputs)
            return inputs

    model = model_of(group)
    model.calls[3].__class__ = Printing
    TRACED.compile_blocks(model)
    with problem("--compile … Printing … leave --compile out"):
        model(batch())


def test_gradients_survive_the_replay_of_cuda_graphs(group):
    # Stands for a graph, which writes its gradients where those of the one before were.
    model = model_of(group)
    Compiler(mode="reduce-overhead", compiles_loss=False, backend="eager").compile_blocks(model)
    weight = model.calls[3].mlp.dense_h_to_4h.weight
    buffer = torch.ones_like(weight)
    torch.autograd.backward(weight, buffer)
    buffer.zero_()
    assert weight.grad.eq(1).all()


@pytest.mark.skipif(not which("g++"), reason="inductor needs a C++ compiler")
def test_generated_code_trains_as_the_reference_does(group, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiler = Compiler(mode="default", compiles_loss=True)
    loss = next_token_loss(group, vocab_size=11)
    model, plain = model_of(group, compiler=compiler), model_of(group)
    with torch._inductor.config.patch(compile_threads=1):
        found = losses_of(model, compiler.compile_loss(loss))
    assert_close(found, losses_of(plain, loss), atol=1e-5, rtol=0)
