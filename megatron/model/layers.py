"""A model as a list of layers that are not built yet, and the plain reader of such a list."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Tie:
    """Layers with the same key share one weight; `forward` says how this one uses it.

    Args:
        key: name of the shared weight's owner among the tied modules.
        weight: path of the weight inside the layer.
        forward: called as forward(layer, x) in place of layer(x).
    """

    key: str
    weight: str
    forward: Callable[[Any, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Layer:
    """A layer not built yet. Only the pipeline stage that owns it allocates its weights.

    Its place in the list is its number in the checkpoint (layer_03-model_00-...), and the
    name of its class is what --pp-partition-method matches: both are interfaces.
    """

    cls: type[nn.Module]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tie: Tie | None = None

    def build(self) -> nn.Module:
        """Return the layer itself, its weights allocated."""
        return self.cls(**self.kwargs)


Step = Layer | Callable[[Any], Any]
"""One entry of the list: a layer, or a function without weights such as a transpose."""


def _recomputed(recompute: Callable[..., Any], layer: Callable[[Any], Any], inputs: Any) -> Any:
    """Call `layer` through `recompute`, which keeps tensors, not tuples of them."""
    if isinstance(inputs, tuple):
        return recompute(lambda *tensors: layer(tensors), *inputs)
    return recompute(layer, inputs)


class SequentialModel(nn.Module):
    """The whole list in one module, tied layers once, with the pipeline's parameter names.

    Args:
        steps: the list.
        recompute: wraps the call of a layer whose activations are computed again in backward.
        recomputed: names of the layer classes that `recompute` wraps.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        *,
        recompute: Callable[..., Any] | None = None,
        recomputed: Sequence[str] = (),
    ):
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.calls: list[Callable[[Any], Any]] = []
        for number, step in enumerate(steps):
            call = self._add(number, step)
            if recompute and type(call).__name__ in recomputed:
                call = partial(_recomputed, recompute, call)
            self.calls.append(call)

    def forward(self, inputs: Any) -> Tensor:
        """Pass `inputs` through every step in turn."""
        for call in self.calls:
            inputs = call(inputs)
        return inputs

    def _add(self, number: int, step: Step) -> Callable[[Any], Any]:
        if not isinstance(step, Layer):
            return step
        if step.tie is None:
            layer = step.build()
            self.add_module(str(number), layer)
            return layer
        if step.tie.key not in self.tied_modules:
            self.tied_modules[step.tie.key] = step.build()
        layer = self.tied_modules[step.tie.key]
        return partial(step.tie.forward, layer) if step.tie.forward else layer
