"""Shards of Megatron-LM's parameters joined by their shapes."""

import pytest
import torch

from megatron.checkpointing.megatron_lm.foreign_checkpoint import Rows, latent_rows, latent_sizes

ARGUMENTS = {
    "multi_latent_attention": True,
    "kv_lora_rank": 6,
    "q_lora_rank": 8,
    "qk_pos_emb_head_dim": 2,
}
ROWS = Rows(
    version=3,
    head_dim=4,
    gate=None,
    latent=latent_rows(ARGUMENTS, heads=2),
    latent_sizes=latent_sizes(ARGUMENTS),
)


@pytest.mark.parametrize("name", ["q_down", "kv_down"])
@pytest.mark.parametrize("kind", ["bias", "weight"])
def test_what_makes_latents_is_copied_or_sharded_by_its_rows_not_its_values(name, kind):
    name = f"layers.0.self_attention.{name}.{kind}"
    shape = (8, 3) if kind == "weight" else (8,)
    for full in (torch.zeros(shape), torch.randn(shape)):
        joined = ROWS.join(name, [full])
        assert joined.shape == shape
        assert torch.equal(ROWS.join(name, [full, full]), joined)
        assert torch.equal(ROWS.join(name, [*full.chunk(2)]), joined)
