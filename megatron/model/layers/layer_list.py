"""A model as a list of layers that are not built yet, and the plain reader of such a list."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from megatron.model.layers.layer_input import LayerInput, Tensors


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


Call = Callable[[Any], Any]
"""What a step becomes when it is built: a layer, or the function itself."""

Step = Layer | Callable[[Any], Any]
"""One entry of the list: a layer, or a function without weights such as a transpose."""


@dataclass(frozen=True)
class Recomputation:
    """Which layers of a stage are computed again in backward, together with which others.

    Args:
        names: of the layer classes that this is about.
        groups: which of so many such layers make a group each, by their order.
        call: calls its first argument with the others and keeps those alone.
    """

    names: Collection[str]
    groups: Callable[[int], Iterable[range]]
    call: Callable[..., Any]

    def applied(self, calls: Sequence[Call]) -> list[Call]:
        """Return what does the same as `calls` in turn: each group is one call, the rest stays."""
        places = [i for i, call in enumerate(calls) if type(call).__name__ in self.names]
        joined: list[Call] = list(calls)
        for group in self.groups(len(places)):
            for run in _runs([places[i] for i in group]):
                inner = [calls[place] for place in run]
                joined[run[0]] = partial(self._recomputed, inner)
                joined[run[0] + 1 : run[-1] + 1] = [_nothing] * (len(run) - 1)
        return [call for call in joined if call is not _nothing]

    def _recomputed(self, calls: Sequence[Call], inputs: LayerInput) -> LayerInput:
        """Return the output of `calls`, which has the same fields as `inputs`."""

        def run(*tensors: Tensor) -> Tensors:
            return in_turn(calls, LayerInput.unpack(inputs.present, tensors)).pack()

        # Checkpointing functions take and return tensors, not tuples of them.
        tensors = [tensor for tensor in inputs if tensor is not None]
        return LayerInput.unpack(inputs.present, self.call(run, *tensors))


def in_turn(calls: Iterable[Call], inputs: Any) -> Any:
    """Pass `inputs` through every call in turn."""
    for call in calls:
        inputs = call(inputs)
    return inputs


def _nothing(inputs: Any) -> Any:
    return inputs


def _runs(places: Iterable[int]) -> list[list[int]]:
    """Return `places` cut where one does not follow the one before."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


class SequentialModel(nn.Module):
    """The whole list in one module, tied layers once, with the pipeline's parameter names.

    Args:
        steps: the list.
        recomputation: which layers are computed again in backward; None for none.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        *,
        recomputation: Recomputation | None = None,
    ):
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        calls = [self._add(number, step) for number, step in enumerate(steps)]
        self.calls = recomputation.applied(calls) if recomputation else calls

    def forward(self, inputs: Any) -> Tensor:
        """Pass `inputs` through every step in turn."""
        return in_turn(self.calls, inputs)

    def _add(self, number: int, step: Step) -> Call:
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
