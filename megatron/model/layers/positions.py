"""How positions enter attention: rotary angles, ALiBi slopes, biases of relative positions.

Angles and slopes are computed where they are used, so nothing of them is stored or saved.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.common.registry import POSITION_EMBEDDINGS
from megatron.config.network.model import PositionSpec
from megatron.config.network.model_spec import ModelSpec


class PositionEmbedding(nn.Module):
    """Position embedding of a plugin; subclasses override `embed`, `turn` or both.

    Args:
        spec: the network.
        number: of the layer that calls `turn`, from 1 on; 0 in the embedding, which calls `embed`.
            Weights belong there alone: layers of tensor-parallel ranks would let them drift apart.
        flags: the plugin's section of flags, if it was registered with one.
    """

    def __init__(self, spec: ModelSpec, *, number: int, flags: Any = None):
        super().__init__()
        self.spec, self.number, self.flags = spec, number, flags

    def embed(self, x_bsh: Tensor, positions_bs: Tensor) -> Tensor:
        """Return the token embeddings with positions, [b, s, h]."""
        return x_bsh

    def turn(self, query: Tensor, key: Tensor, positions_bs: Tensor) -> tuple[Tensor, Tensor]:
        """Return query [b, a, s, d] and key [b, g, s, d] with positions, of this rank's heads."""
        return query, key


def own_position_embedding(spec: ModelSpec, *, number: int) -> PositionEmbedding | None:
    """Build the plugin's position embedding of a layer; None if the network has a built-in one."""
    POSITION_EMBEDDINGS.require(spec.positions.position_embedding)
    if not POSITION_EMBEDDINGS.is_own(spec.positions.position_embedding):
        return None
    return POSITION_EMBEDDINGS.get(spec.positions.position_embedding, spec.own_flags)(
        spec, number=number
    )


def rotary_tables(positions_bs: Tensor, spec: PositionSpec) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every angle, in 32 bits.

    Shapes: positions_bs [b, s] int64 -> two of [b, 1, s, rotary_dim / 2].
    Source: arXiv:2104.09864, section 3.2.2; arXiv:2306.15595, section 2.3, for interpolation.
    """
    frequencies = rotary_frequencies(spec, positions_bs.device)
    places_bs = positions_bs.float() / spec.rotary_interpolation
    angles = (places_bs[..., None] * frequencies)[:, None]
    factor = spec.rope_attention_factor
    return angles.cos() * factor, angles.sin() * factor


def rotary_frequencies(spec: PositionSpec, device: torch.device) -> Tensor:
    """Return the angle per position of every pair of features: [rotary_dim / 2] float32.

    Dynamic NTK changes nothing up to the trained length, which is the longest one here. LongRoPE's
    list of factors is the one of `PositionSpec.within`.

    Source: arXiv:2104.09864, section 3.2.2; for the stretched wavelengths arXiv:2407.21783,
    section 3.2, arXiv:2309.00071, section 3.2, and arXiv:2402.13753, section 3.
    """
    pairs = torch.arange(0, spec.rotary_dim, 2, device=device, dtype=torch.float32)
    frequencies = 1.0 / spec.rotary_base ** (pairs / spec.rotary_dim)
    if spec.rope_scaling == 1 or spec.rope_rule == "dynamic":
        return frequencies
    if spec.rope_rule == "longrope":
        return frequencies / torch.tensor(spec.rope_short_factors, device=device)
    kept = (_llama_kept_fraction if spec.rope_rule == "llama3" else _yarn_kept_fraction)(
        spec, frequencies
    )
    return frequencies * (kept + (1 - kept) / spec.rope_scaling)


def _llama_kept_fraction(spec: PositionSpec, frequencies: Tensor) -> Tensor:
    """Return the fraction of each frequency that is kept (1) rather than interpolated (0), by wavelength."""
    turns = spec.rope_original_length * frequencies / (2 * math.pi)
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn_kept_fraction(spec: PositionSpec, frequencies: Tensor) -> Tensor:
    """Return the fraction of each frequency that is kept (1) rather than interpolated (0): a linear ramp.

    The ramp is linear in the index of the pair, as in the code of the paper, which published networks
    were trained with; in the text of the paper it is linear in the number of rotations.
    """

    def pair_of(turns: float) -> float:
        wavelengths = math.log(spec.rope_original_length / (turns * 2 * math.pi))
        return spec.rotary_dim * wavelengths / (2 * math.log(spec.rotary_base))

    first, last = pair_of(spec.rope_high_freq_factor), pair_of(spec.rope_low_freq_factor)
    if spec.rope_truncation:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    if first == last:
        last += 0.001  # a step
    pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=torch.float32)
    return 1 - ((pairs - first) / (last - first)).clamp(0, 1)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return by how much each head's scores fall with every token of distance: [a] float32.

    Powers of 2^(-8/n) for n heads when n is a power of two. Otherwise the slopes for the next
    smaller power of two, then every second slope for the next greater one.

    Source: arXiv:2108.12409, section 3 and its published code.
    """
    power = 2 ** (num_heads.bit_length() - 1)
    heads = torch.arange(num_heads, device=device, dtype=torch.float32)
    exponents = torch.where(heads < power, heads + 1, heads - power + 0.5) * (8 / power)
    return torch.exp2(-exponents)


@dataclass(frozen=True)
class RelativePositions:
    """Biases of attention scores by the bucket of the distance between query and key (arXiv:1910.10683).

    Args:
        table_na: [buckets, a], a bias for each bucket and head of this rank.
        max_distance: keys that are this far away, or farther, share the last bucket.
        bidirectional: whether keys after the query have separate buckets.
    """

    table_na: Tensor
    max_distance: int
    bidirectional: bool

    def bias(self, sq: int, sk: int) -> Tensor:
        """Return [1, a, sq, sk]. Queries are the last positions of the keys."""
        device = self.table_na.device
        queries_q1 = torch.arange(sk - sq, sk, device=device)[:, None]
        return self.at(torch.arange(sk, device=device) - queries_q1).permute(2, 0, 1)[None]

    def by_distance(self, sq: int, sk: int) -> Tensor:
        """Return [a, sq + sk - 1]: biases of keys from sk - 1 before the query to sq - 1 after it."""
        return self.at(torch.arange(1 - sk, sq, device=self.table_na.device)).T.contiguous()

    def at(self, distances: Tensor) -> Tensor:
        """Return the biases [..., a] of distances, each the key's position minus the query's."""
        buckets = relative_buckets(
            distances,
            num_buckets=self.table_na.size(0),
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return F.embedding(buckets, self.table_na)


def relative_buckets(
    distances: Tensor, *, num_buckets: int, max_distance: int, bidirectional: bool
) -> Tensor:
    """Return the bucket of each distance, the key's position minus the query's.

    Half of the buckets hold one distance each, the rest are log-spaced, and the last is open-ended.
    If `bidirectional`, the upper half of all buckets is for keys after the query, which otherwise
    share bucket 0.

    Source: arXiv:1910.10683, section 2.1.
    """
    first = torch.zeros_like(distances)
    if bidirectional:
        num_buckets //= 2
        first = (distances > 0).long() * num_buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    exact = num_buckets // 2
    growth = (distances.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    above = exact + (growth * (num_buckets - exact)).long()
    return first + torch.where(distances < exact, distances, above.clamp(max=num_buckets - 1))
