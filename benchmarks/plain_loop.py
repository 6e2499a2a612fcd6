"""The peer of the training benchmarks: the same GPT as a plain PyTorch loop, in one file."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.model_spec import ModelSpec


class PlainBlock(nn.Module):
    """Attention and MLP behind norms, batch first."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        width = spec.hidden_size
        self.heads = spec.attention.num_attention_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_bsh: Tensor) -> Tensor:
        """Return [b, s, h]."""
        b, s, h = x_bsh.shape
        qkv = self.qkv(self.norm_1(x_bsh)).split(h, dim=2)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_bsh = x_bsh + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        inner = F.gelu(self.up(self.norm_2(x_bsh)), approximate="tanh")
        return x_bsh + self.down(inner)


class PlainGPT(nn.Module):
    """Learned positions, tied head."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.tokens = nn.Embedding(spec.vocabulary.padded_vocab_size, spec.hidden_size)
        self.positions = nn.Embedding(spec.positions.max_position_embeddings, spec.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(spec) for _ in range(spec.num_layers))
        self.norm = nn.LayerNorm(spec.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=spec.init_std)

    def forward(self, tokens_bs: Tensor, labels_bs: Tensor) -> Tensor:
        """Return the mean loss."""
        x = self.tokens(tokens_bs) + self.positions.weight[: tokens_bs.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels_bs.flatten())


class PlainLoop:
    """AdamW in one fused pass, clipping at 1, autocast when `dtype` is bf16.

    Args:
        compiles: whether torch.compile makes the forward and backward pass.
        by_blocks: whether it compiles each block, as one graph, and nothing else.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: str,
        lr: float,
        *,
        device: torch.device,
        compiles: bool = False,
        by_blocks: bool = False,
    ):
        with device:
            self.model = PlainGPT(spec)
        self.forward = torch.compile(self.model) if compiles and not by_blocks else self.model
        if by_blocks:
            for block in self.model.blocks:
                block.compile(fullgraph=True, dynamic=False)
        self.device, self.bf16 = device, dtype == "bf16"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)

    def step(self, tokens_bs: Tensor, labels_bs: Tensor) -> float:
        """Take one optimizer step; return its loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.forward(tokens_bs, labels_bs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
