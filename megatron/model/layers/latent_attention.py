"""Multi-head latent attention (MLA): keys and values of all heads come from one narrow latent."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.network.latent import LatentSpec
from megatron.config.network.model_spec import ModelSpec
from megatron.model.layers.attention import ParallelAttention
from megatron.model.layers.attention_kernels import Attend, Mask
from megatron.model.layers.norms import norm_layer
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.collectives import copy_to_tensor_parallel, gather_sequence
from megatron.tensor_parallel.linear import ColumnParallelLinear, Product
from megatron.tensor_parallel.sharding import exact_quotient, mark_sharded


class LocalLinear(nn.Module):
    """y = x W^T + b without communication.

    Args:
        group: ranks that divide the output features; None if each has all of them.
        product: computes x W^T, such as in fp8; None for torch's.

    Shapes: x [..., in_features] -> y [..., out_features / t], t the group's size.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        group: dist.ProcessGroup | None = None,
        product: Product | None = None,
    ):
        super().__init__()
        self.sizes, self.product = (in_features, out_features), product
        if group is None:
            self.weight = nn.Parameter(torch.empty(out_features, in_features))
        else:
            rows = exact_quotient(out_features, group.size(), "out_features")
            weight = nn.Parameter(torch.empty(rows, in_features))
            self.weight = mark_sharded(weight, 0, group)
        bias = nn.Parameter(torch.zeros(out_features)) if has_bias else None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is None:
            return F.linear(x, self.weight, self.bias)
        y = self.product(x, self.weight)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Return the sizes over all ranks."""
        return f"in_features={self.sizes[0]}, out_features={self.sizes[1]}"


class LatentAttention(ParallelAttention):
    """Multi-head latent attention (MLA).

    Queries come from a latent too, or from the hidden state; keys and values of all heads from a latent c
    of each token, and from one key k with rotary positions that all heads share:
    score = (q_plain . W_k c + rotate(q_turned) . rotate(k)) * scale, value = W_v c.
    Generation caches c and rotate(k). Attention to the cache is absorbed: queries are multiplied by W_k and
    mixed latents by W_v, so that the cache is read as it is, like one group of queries whose values are a
    part of its key.

    Rows of a head in the weights of queries are {turned, plain}; of W_k and W_v (`kv_up`) {plain, values};
    rows of `kv_down` are {c, k}. Weights that make latents are replicated: with tensor parallelism
    gradients of latents are summed over the ranks, so that those of the weights are equal.

    Args:
        spec: the network, with a part `latent`.
        parts: what its layers are built with.
        number: the layer's, from 1 on.

    Shapes: as in ParallelAttention.
    Communication: one all-reduce of [s, b, h] over `group` forward; backward one of the features of the
        latents, without a latent of queries also one of [s, b, h].
    Source: arXiv:2405.04434, section 2.1 and appendix C.
    """

    q_layernorm: nn.Module
    kv_layernorm: nn.Module

    def build_core(self, number: int) -> Attend:
        """Return the core attention kernel of training and prefill; build the cache of latents."""
        latent = self.latent = self.spec.part(LatentSpec)
        self.rank, self.turned = latent.kv_lora_rank, latent.qk_pos_emb_head_dim
        self.cache = self.parts.token_cache(groups=1, widths=(latent.cached_features,))
        return self.parts.core_attention(number)

    def build_inputs(self) -> None:
        """Build the linear layers before the core, and the norms of latents."""
        spec, latent, product = self.spec, self.latent, self.kernels.linear
        width, of_queries = spec.hidden_size, latent.q_lora_rank
        of_heads = spec.attention.num_attention_heads * (self.plain + latent.v_head_dim)
        form: dict[str, Any] = {"has_bias": spec.attention.qkv_bias, "product": product}
        queries = ColumnParallelLinear(
            of_queries or width,
            spec.attention.query_features,
            has_bias=False,
            product=product,
            **self.parts.division,
        )
        if of_queries:
            self.q_down, self.q_up = LocalLinear(width, of_queries, **form), queries
        else:
            self.query = queries
        self.kv_down = LocalLinear(width, latent.cached_features, **form)
        self.kv_up = LocalLinear(self.rank, of_heads, group=self.group, product=product)

    def build_norms(self) -> None:
        """Build the norms of the latents."""
        sizes = {"q_layernorm": self.latent.q_lora_rank, "kv_layernorm": self.rank}
        for name, width in sizes.items():
            if width:
                norm = norm_layer(
                    self.spec,
                    width=width,
                    eps=self.latent.latent_norm_epsilon,
                    kernels=self.kernels,
                )
                self.add_module(name, norm.build())

    @property
    def plain(self) -> int:
        """Features of a head's queries and keys without positions."""
        return self.spec.attention.head_dim - self.turned

    def project(
        self, x_sbh: Tensor, tables: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query and key [b, a, s, d] and value [b, a, s, v]; with cached tokens latents for both."""
        norms = self.spec.norm.qk_layernorm
        if self.latent.q_lora_rank:
            c = self.q_down(x_sbh)
            query = self.q_up(self.q_layernorm(c) if norms else c)
        else:
            query = self.query(x_sbh)
        query = query.unflatten(2, (self.local_groups, -1)).permute(1, 2, 0, 3)
        c, k = self.kv_down(x_sbh).split([self.rank, self.turned], dim=-1)
        latents = self._share(torch.cat([self.kv_layernorm(c) if norms else c, k], dim=-1))
        c, k = latents.split([self.rank, self.turned], dim=-1)
        k = k.transpose(0, 1)[:, None]
        if tables:
            query, k = (self.kernels.rotary(each, *tables) for each in (query, k))
        if self.cache:
            latents = torch.cat([c.transpose(0, 1)[:, None], k], dim=-1)
            self.cache.store(latents)
            if self.cache.attends_to_cache:
                return query, latents, latents
        of_heads = self.kv_up(c).unflatten(2, (self.local_groups, -1)).permute(1, 2, 0, 3)
        plain, value = of_heads.split([self.plain, self.latent.v_head_dim], dim=-1)
        return query, torch.cat([k.expand(-1, plain.size(1), -1, -1), plain], dim=-1), value

    def _share(self, latents: Tensor) -> Tensor:
        """Return the latents of all tokens; backward sums their gradients over the ranks."""
        if self.parts.sequence_parallel:
            return gather_sequence(latents, 0, self.group)
        return copy_to_tensor_parallel(latents, self.group)

    def core(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any) -> Tensor:
        """Return the mixed values [b, a, s, v]; absorbed if they are of cached latents."""
        if self.cache is None or not self.cache.attends_to_cache:
            return super().core(query, key, value, mask, **options)
        by_head = self.kv_up.weight.unflatten(0, (self.local_groups, -1))
        of_keys, of_values = by_head.split([self.plain, self.latent.v_head_dim], dim=1)
        turned, plain = query.split([self.turned, self.plain], dim=-1)
        absorbed = torch.cat([plain @ of_keys, turned], dim=-1)
        how = self.score_options(query, mask, **options)
        return self.cache.attend(absorbed, how, value_width=self.rank) @ of_values.mT

    def extra_repr(self) -> str:
        """Return the sizes of heads and latents."""
        sizes = ", ".join(f"{name}={size}" for name, size in vars(self.latent).items())
        return f"{super().extra_repr()}, {sizes}"


def build_attention(spec: ModelSpec, parts: LayerParts, *, number: int) -> ParallelAttention:
    """Return the self-attention of the layer `number`."""
    kind = LatentAttention if spec.latent else ParallelAttention
    return kind(spec, parts, number=number)
