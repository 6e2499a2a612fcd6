"""LayerInput: the named tensors that layers pass to each other, and across pipeline stages.

Attention masks travel as spans. An s x s mask would be larger than the activations, but what a
token sees is one range of positions in every objective here: the text before it, its own document
up to it, or a prefix in full. So two numbers for each token are enough, and their shape never
changes; they travel when they do not follow from the order of the tokens.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Tensors = Tensor | tuple[Tensor, ...]
"""What DeepSpeed sends between pipeline stages and keeps for activation checkpointing."""


INTEGERS = frozenset({"positions", "attention_span", "encoder_span"})
"""Fields of a `LayerInput` that have no gradient; tensors in `batch` have none either."""


T = TypeVar("T")


Shared = dict[Hashable, Any]
"""Memo of one micro-batch: what several layers derive alike, such as attention masks.

Recomputed layers (activation checkpointing) get the memo of their first forward pass. So values must
be without gradient, and follow from fields of the `LayerInput` alone. A plain dictionary, which
torch.compile can trace.
"""


def once(shared: Shared, key: Hashable, build: Callable[[], T]) -> T:
    """Return the value of `key`; the first call builds it."""
    if key not in shared:
        shared[key] = build()
    value: T = shared[key]
    return value


class PassInput(NamedTuple):
    """Tokens of a pass of generation, from which a network's first layer gets its batch.

    Args:
        tokens: [b, s] int64, padded at the end; in a decode step s is 1.
        positions: [b, s] int64.
        is_decode: whether the pass is a decode step.
        attention_span: as of a `LayerInput`, for prefix language models.
        prompt_lengths: [b] int64, of a network with contexts, in prefill.
        contexts: [b, k, r] int64, tokens of the k texts that a sequence attends to in addition to
            its own, padded, in prefill.
        context_lengths: [b, k] int64.
    """

    tokens: Tensor
    positions: Tensor
    is_decode: bool
    attention_span: Tensor | None = None
    prompt_lengths: Tensor | None = None
    contexts: Tensor | None = None
    context_lengths: Tensor | None = None


class LayerInput(NamedTuple):
    """Input and output of a transformer layer: activations, and what comes with them if present.

    A layer replaces the fields that it computes and passes on the rest.

    Args:
        hidden: activations: [s, b, h] between transformer layers, [b, s, h] before the first.
        positions: [b, s] int64, for layers that rotate queries and keys.
        attention_span: [b, s, 2] int64, the first position that a token sees and the one after
            the last, or [b, 1, 2] where all tokens of a sample see the same; None for causal
            attention.
        encoder_hidden: output of an encoder, for cross-attention.
        encoder_span: as attention_span, of positions of `encoder_hidden`.
        relative_table: [buckets, a] biases of relative positions, of this rank's heads.
        batch: fields of the batch that a layer further on reads, such as the tokens of the
            decoder after an encoder; integers. Only the first stage has the batch itself.
        shared: memo of what layers derive from the fields above. It does not travel: the first
            layer of a pipeline stage, or of a decoder, begins another one.
        pending: output [s, b, h] and bias [h] of the last sublayer, which the next layer adds to
            `hidden`: see `link_blocks`. None: `hidden` is complete. It does not travel.
    """

    hidden: Tensor
    positions: Tensor | None = None
    attention_span: Tensor | None = None
    encoder_hidden: Tensor | None = None
    encoder_span: Tensor | None = None
    relative_table: Tensor | None = None
    batch: Mapping[str, Tensor] | None = None
    shared: Shared | None = None
    pending: tuple[Tensor, Tensor | None] | None = None

    def replace(self, **changes: Any) -> "LayerInput":
        """Return these fields with some of them changed.

        Unlike `_replace`, torch.compile of every supported PyTorch can trace it.
        """
        return LayerInput(**(dict(zip(self._fields, self, strict=True)) | changes))

    def tensors(self) -> dict[str, Tensor]:
        """Return the present tensors by name, in a fixed order; tensors in `batch` come last."""
        tensors = {name: x for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return tensors | dict(sorted((self.batch or {}).items()))

    def pack(self) -> Tensors:
        """Return the present tensors without their names: a tuple, or `hidden` if it is alone."""
        tensors = tuple(self.tensors().values())
        return tensors if len(tensors) > 1 else self.hidden

    @classmethod
    def unpack(cls, names: Iterable[str], tensors: Tensors) -> "LayerInput":
        """Invert `pack`, given the names of the tensors in their order.

        Raises:
            ValueError: there are more or fewer tensors than names.
        """
        if isinstance(tensors, Tensor):
            tensors = (tensors,)
        named: dict[str, Any] = dict(zip(names, tensors, strict=True))
        batch = {name: named.pop(name) for name in [*named] if name not in cls._fields}
        return cls(**named, batch=batch or None)
