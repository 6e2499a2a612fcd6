"""An encoder and a decoder over pipeline stages against plain PyTorch in one process.

Different tensors travel at different edges: inputs of the decoder in front of it, the encoder's
output behind. The token table is on up to three stages.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from problems import problem
from ranks import outcomes_on_ranks, require_passed
from tiny import tiny_plan
from torch import nn
from torch.testing import assert_close

from megatron.config.parallelism.recompute_plan import NOTHING
from megatron.engine.build import build_engine
from megatron.engine.deepspeed import distributed
from megatron.engine.deepspeed.recompute import start_streams
from megatron.engine.pipeline_module import pipeline_module
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import Block, Layer, SequentialModel, Tie
from megatron.tensor_parallel.process_groups import build_groups
from megatron.tensor_parallel.topology import Topology

FIELDS = ("tokens", "lengths", "decoder_tokens", "labels")
B, S, D, H, V = 2, 6, 4, 8, 11


class Embedding(nn.Module):
    """Tokens to the activations of the encoder; the decoder's tokens go along."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, H)

    def forward(self, batch):
        later = {"decoder_tokens": batch["decoder_tokens"]}
        return LayerInput(self.words(batch["tokens"]), encoder_span=batch["lengths"], batch=later)


class EncoderTransformerLayer(Block):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(H, H)

    def forward(self, inputs):
        return inputs.replace(hidden=inputs.hidden + self.dense(inputs.hidden).tanh())


class DecoderEmbedding(Embedding):
    def forward(self, inputs):
        hidden = self.words(inputs.batch["decoder_tokens"])
        return inputs.replace(hidden=hidden, encoder_hidden=inputs.hidden, batch=None)


class DecoderTransformerLayer(Block):
    """Cross-attention over the real tokens of the encoder, of which there are `encoder_span`."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, inputs):
        keys = self.key(inputs.encoder_hidden)
        scores = self.query(inputs.hidden) @ keys.mT
        hidden_keys = torch.arange(S) >= inputs.encoder_span[:, None, None]
        weights = scores.masked_fill(hidden_keys, -torch.inf).softmax(-1)
        return inputs.replace(hidden=inputs.hidden + weights @ keys)


def only_hidden(inputs):
    return inputs.hidden


def loss(logits, batch):
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def layers():
    embedding = Layer(
        Embedding,
        tie=Tie("words", "words.weight"),
        carried=("hidden", "encoder_span", "decoder_tokens"),
    )
    decoder_embedding = Layer(
        DecoderEmbedding,
        tie=Tie("words", "words.weight", DecoderEmbedding.forward),
        carried=("hidden", "encoder_hidden", "encoder_span"),
    )
    head = Layer(Embedding, tie=Tie("words", "words.weight", lambda e, x: x @ e.words.weight.T))
    decoder = [Layer(DecoderTransformerLayer) for _ in range(2)]
    return [
        embedding,
        *(Layer(EncoderTransformerLayer) for _ in range(2)),
        decoder_embedding,
        *decoder,
        only_hidden,
        head,
    ]


def initialise(model):
    """Fill the weights by name, so that no layout changes them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {
            "tokens": torch.randint(V, (B, S), generator=generator),
            "lengths": torch.randint(1, S + 1, (B,), generator=generator),
            "decoder_tokens": torch.randint(V, (B, D), generator=generator),
            "labels": torch.randint(V, (B, D), generator=generator),
        }


def steps_are_those_of_one_process(stages, *flags, tensor=1, partition=None):
    """Loss, norm and weights over three steps of four micro-batches."""
    distributed.start("gloo")
    groups = build_groups(Topology(pipeline=stages, data=1, tensor=tensor))
    plan = tiny_plan(
        *("--pipeline-model-parallel-size", str(stages), "--num-layers", "4"),
        *("--global-batch-size", "8", "--clip-grad", "0.5", *flags),
        *("--tensor-model-parallel-size", str(tensor)),
        world_size=stages * tensor,
    )
    method = partition or plan.parallel.partition_method
    start_streams(groups, seed=5, activation_checkpointing={})
    engine = build_engine(
        layers(),
        loss=loss,
        groups=groups,
        parallel=replace(plan.parallel, partition_method=method),
        recompute=plan.recompute,
        initialise=initialise,
        build_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        config=plan.deepspeed,
        batch_fields=FIELDS,
    )
    model = SequentialModel(layers())
    initialise(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read, own = batches(), batches()
    for _ in range(3):
        losses = [loss(model(given), given) for given in (next(own) for _ in range(4))]
        mean = torch.stack(losses).mean()
        optimizer.zero_grad()
        mean.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert_close(engine.train_batch(read).squeeze(), mean.detach())
        assert engine.grad_norm == pytest.approx(float(norm), rel=1e-4)
    expected = dict(model.named_parameters())
    held = dict(engine.module.named_parameters())
    for name, parameter in held.items():
        assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        losses = [loss(model(given), given) for given in (next(own) for _ in range(2))]
    assert_close(engine.evaluate(read, 2).squeeze(), torch.stack(losses).mean())
    return held


def one_layer_a_stage(rank):
    held = steps_are_those_of_one_process(4, "--zero-stage", "0")
    # DeepSpeed cuts in front of transformer layers: the third stage begins behind the table.
    assert ("tied_modules.words.words.weight" in held) == (rank != 2)


def with_zero_1(rank):
    steps_are_those_of_one_process(4, "--zero-stage", "1")


def with_recomputation(rank):
    steps_are_those_of_one_process(4, "--checkpoint-activations")


def with_tensor_ranks(rank):
    steps_are_those_of_one_process(2, "--checkpoint-activations", tensor=2)


def the_table_is_on_two_stages(rank):
    steps_are_those_of_one_process(2, "--checkpoint-activations")


def both_stacks_on_one_stage(rank):
    steps_are_those_of_one_process(
        2, "--checkpoint-activations", partition="type:decodertransformer"
    )


def module_of(steps):
    distributed.start("gloo")
    return pipeline_module(
        steps,
        topology=Topology(pipeline=2, data=1, tensor=1),
        loss=loss,
        partition_method="type:transformer",
        recompute=NOTHING,
        batch_fields=FIELDS,
    )


def tensors_that_no_layer_declares_are_refused(rank):
    steps = layers()
    steps[3] = replace(steps[3], carried=("hidden", "encoder_span"))
    module = module_of(steps)
    if rank == 0:
        batch = next(batches())
        with problem("encoder_hidden, encoder_span … declare", ValueError):
            module(tuple(batch[name] for name in FIELDS))


CHECKS = {
    2: [
        tensors_that_no_layer_declares_are_refused,
        the_table_is_on_two_stages,
        both_stacks_on_one_stage,
    ],
    4: [one_layer_a_stage, with_zero_1, with_recomputation, with_tensor_ranks],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    outcomes = {}
    for stages, checks in CHECKS.items():
        outcomes |= outcomes_on_ranks(stages, checks, tmp_path_factory.mktemp("ranks"))
    return outcomes


@pytest.mark.parametrize("check", [*CHECKS[2], *CHECKS[4]], ids=lambda check: check.__name__)
def test_an_encoder_and_a_decoder(check, outcomes):
    require_passed(check, outcomes)
