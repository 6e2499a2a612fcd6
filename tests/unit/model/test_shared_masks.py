"""Attention masks are made once per micro-batch, for all layers and for their recomputation."""

from dataclasses import replace

import pytest
import torch
from networks import gpt_steps
from tiny import tiny_spec
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.config.data.masks import MaskPlan
from megatron.model.initialization import initialise
from megatron.model.layers.attention_kernels import sdpa_attention
from megatron.model.layers.layer_list import Layer, Recomputation, SequentialModel
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.model.loss import next_token_loss
from megatron.objectives.gpt import gpt_batch
from megatron.tensor_parallel.rng import OrdinaryStream

EOD, LAYERS, LENGTH = 9, 4, 6
TOKENS = torch.tensor([[3, 1, EOD, 4, 5, EOD, 2], [EOD, EOD, 6, 7, 1, 2, 3]])
DOCUMENTS = MaskPlan(reset_positions=True, isolate_documents=True, mask_loss=True)
NO_MASKS = MaskPlan(reset_positions=False, isolate_documents=False, mask_loss=False)
NETWORKS = {
    "documents": ({}, DOCUMENTS, 1),
    "window": ({"window": 3, "full_attention_layers": (2,)}, NO_MASKS, 1),
    "documents and windows": ({"window": 3, "full_attention_layers": (2,)}, DOCUMENTS, 2),
    "ALiBi": ({"position_embedding": "alibi"}, NO_MASKS, 1),
    "ALiBi and documents": ({"position_embedding": "alibi"}, DOCUMENTS, 1),
}


class Alone(ParallelTransformerLayerPipe):
    """Layer that computes its mask itself."""

    def forward(self, inputs):
        return super().forward(inputs.replace(shared=None))


class Run:
    """Losses, gradients and the masks of one forward and backward pass."""

    def __init__(self, case, group, *, shares=True, recomputes=False):
        changes, masks, self.expected = NETWORKS[case]
        self.masks, self.saved = {}, set()
        spec = tiny_spec(num_layers=LAYERS, **changes)
        steps = gpt_steps(
            spec,
            group=group,
            rng=OrdinaryStream(),
            mixed=False,
            core_attention=lambda number: self.attend,
        )
        if not shares:
            steps = [
                replace(step, cls=Alone)
                if isinstance(step, Layer) and step.cls is ParallelTransformerLayerPipe
                else step
                for step in steps
            ]
        each = Recomputation(
            lambda count: [range(i, i + 1) for i in range(count)],
            lambda run, *x, shared: checkpoint(run, *x, use_reentrant=True),
        )
        model = SequentialModel(steps, recomputation=each if recomputes else None)
        initialise(model, seed=1, std=0.5, num_layers=LAYERS)
        batch = gpt_batch(TOKENS, masks, EOD)
        with saved_tensors_hooks(self.save, lambda x: x):
            loss = next_token_loss(group)(model(batch), batch)
        loss.backward()
        self.numbers = [loss.detach(), *(p.grad for p in model.parameters())]

    def attend(self, query, key, value, how):
        self.masks[id(how.mask)] = how.mask
        return sdpa_attention(query, key, value, how)

    def save(self, x):
        if x.dtype == torch.float32 and x.shape[-2:] == (LENGTH, LENGTH):
            self.saved.add(x.untyped_storage().data_ptr())
        return x


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("case", NETWORKS)
def test_layers_and_their_recomputation_share_one_mask_of_a_kind(group, case, recomputes):
    alone = Run(case, group, shares=False, recomputes=recomputes)
    shared = Run(case, group, recomputes=recomputes)
    for got, want in zip(shared.numbers, alone.numbers, strict=True):
        assert torch.equal(got, want)
    kinds = 2 if "window" in case else 1
    assert len(shared.masks) == kinds
    assert len(alone.masks) == LAYERS * (2 if recomputes else 1)
    if not recomputes:
        assert len(shared.saved) == shared.expected < len(alone.saved)
