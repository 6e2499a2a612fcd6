"""What every layer of a network is built with, apart from its spec; its state between decode steps.

Generation runs a network many times: a prefill pass over the tokens of new sequences, then decode steps
of one more token each. What a layer needs of earlier tokens is its *state*: keys and values (a KV
cache), the last hidden state of a recurrence, projections of an encoder's output. Layers ask for it when
they are built, and `megatron.inference.runner.model_runner.ModelRunner` allocates it, one row for each
sequence. In training `LayerParts.states` is None and nothing is kept. The contract:

- `parts.self_attention(number, groups=…, head_dim=…)` is core attention, in generation with a KV cache.
- `parts.token_cache(groups=…, widths=…)` is a `TokenCache` of other vectors of each token, such as the
  latents of latent attention; None in training.
- `parts.state(*shape)` is a `DecodeState`, a tensor [rows, *shape]; None in training. One size may be
  None: that dimension is as long as what was written.
- A pass is the prefill of sequences that begin with it, a decode step, or, where no layer has a `state`,
  an extension: several further tokens of each sequence, such as the rest of a prompt whose beginning is
  cached. `state.read()` returns None in prefill, where layers start as in training, and [b, *shape] in
  a decode step.
- `state.write(value)` replaces the states of the sequences of this pass, each pass once at most. In
  prefill, shorter sequences are followed by padding, which a state must not include: `state.last(x)`
  returns the value at the last token of each sequence, `state.lengths` its number of tokens.
- What is computed in prefill and read from then on, such as keys of an encoder's output:
  `once_per_sequence(state, compute)`.
- Rows move: a sequence may have another row in its next pass. Layers index no rows themselves.
- A decode step does the same operations on the same memory for all values of its tokens, so that it can
  be captured as a CUDA graph: no branch on a tensor's values.
- Layers without state, such as an encoder that runs in prefill alone, are built with
  `parts.without_states`; their entry in the list says `Layer(prefill_only=True)`.
- A network whose layers keep what they need says `caches = True`; see
  `megatron.config.architecture.architecture`. Others recompute their sequences for each new token.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.model.layers.attention_kernels import Attend, CoreAttention, ScoreOptions
from megatron.tensor_parallel.rng import OrdinaryStream, RngTracker

MixtureBuilder = Callable[..., nn.Module]
"""Builds the mixture of experts (MoE) of a layer from its spec, parts and number."""


class DecodeState(Protocol):
    """What one layer keeps of each sequence between passes: [rows, *shape]."""

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence in this pass, [b] int64."""
        ...

    def read(self) -> Tensor | None:
        """Return the states of the sequences of a decode step, [b, *shape]; None in prefill."""
        ...

    def write(self, value: Tensor) -> None:
        """Replace the states of the sequences of this pass by `value`, [b, *shape]."""
        ...

    def last(self, x: Tensor) -> Tensor:
        """Return the value at the last token of each sequence: [s, b, ...] -> [b, ...]."""
        ...


class TokenCache(Protocol):
    """Vectors that one layer keeps of each token: tensors [rows, groups, capacity, width]."""

    @property
    def attends_to_cache(self) -> bool:
        """Whether queries of this pass attend to cached tokens; else layers compute as in training."""
        ...

    def store(self, *new: Tensor) -> None:
        """Store the tokens of this pass, [b, groups, s, width] for each tensor; before `attend`."""
        ...

    def attend(self, query: Tensor, how: ScoreOptions, *, value_width: int | None = None) -> Tensor:
        """Attend from the new tokens of each sequence to its cached tokens, the new ones among them.

        Keys are the first tensor, values the first `value_width` features of the last one (default:
        all). Of one tensor, values are thus a part of the keys.

        Shapes: query [b, a, s, width of keys], groups divides a -> [b, a, s, value_width].
        """
        ...


class DecodeStates(Protocol):
    """The states of all layers of a pipeline stage, of which each layer asks for its own."""

    def state(self, *shape: int | None, dtype: torch.dtype | None = None) -> DecodeState:
        """Return a state [rows, *shape] of zeros (default dtype: the activations')."""
        ...

    def attention(self, attend: Attend, *, groups: int, head_dim: int) -> Attend:
        """Return self-attention with a KV cache of `groups` heads; `attend` computes prefill."""
        ...

    def token_cache(self, *, groups: int, widths: Sequence[int]) -> TokenCache:
        """Return the cache of `groups` vectors of each token, in a tensor for each width."""
        ...


def once_per_sequence(state: DecodeState | None, compute: Callable[[], Tensor]) -> Tensor:
    """Compute in prefill, and return what was computed then in decode steps; [b, *shape]."""
    kept = state.read() if state else None
    if kept is not None:
        return kept
    value = compute()
    if state:
        state.write(value)
    return value


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """What every layer of a network is built with, apart from its spec.

    Args:
        group: the tensor-parallel ranks.
        core_attention: returns what computes attention in the layer of a number.
        rng: the stream that differs between ranks of `group`.
        kernels: what computes the operations inside the layers.
        build_mixture: builds the MLPs of layers with experts; None for inference's.
        sequence_parallel: whether the ranks of `group` divide the sequence between layers.
        mixed: whether weights are 16-bit: see `end_of`.
        batch_fields: names of the fields of a batch.
        predicts: whether layers are built that predict tokens after the next one, if the network
            has any; generation does without.
        loss_chunk_tokens: leaves the logits to the loss, as `DeferredLogits`; 0 for none.
        states: what layers keep between decode steps; None in training.
    """

    group: dist.ProcessGroup
    core_attention: CoreAttention
    rng: RngTracker = OrdinaryStream()
    kernels: Kernels = REFERENCE
    build_mixture: MixtureBuilder | None = None
    sequence_parallel: bool = False
    mixed: bool = False
    batch_fields: Collection[str] = ()
    predicts: bool = True
    loss_chunk_tokens: int = 0
    states: DecodeStates | None = None

    @property
    def division(self) -> dict[str, Any]:
        """How weights and sequences are divided, as arguments of a parallel linear layer."""
        return {"group": self.group, "sequence_parallel": self.sequence_parallel}

    @property
    def without_states(self) -> "LayerParts":
        """These parts for layers that keep nothing between decode steps."""
        return replace(self, states=None)

    def state(self, *shape: int | None, dtype: torch.dtype | None = None) -> DecodeState | None:
        """Return the state of a layer: see the module's contract."""
        return self.states.state(*shape, dtype=dtype) if self.states else None

    def self_attention(self, number: int, *, groups: int, head_dim: int) -> Attend:
        """Return causal core attention of the layer `number`, in generation with a KV cache.

        Args:
            groups: query groups of this rank.
        """
        attend = self.core_attention(number)
        if self.states is None:
            return attend
        return self.states.attention(attend, groups=groups, head_dim=head_dim)

    def token_cache(self, *, groups: int, widths: Sequence[int]) -> TokenCache | None:
        """Return the cache of a layer with other vectors of each token: see the module's contract."""
        return self.states.token_cache(groups=groups, widths=widths) if self.states else None
