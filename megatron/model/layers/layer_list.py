"""A model as a list of layers that are not built yet, and the plain reader of such a list."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from megatron.model.layers.layer_input import LayerInput, Tensors


@dataclass(frozen=True)
class Tie:
    """Layers with the same key share one weight; `forward` says how this one uses it.

    Any number of layers may, on any stages; each stage has one module for them, the first of its
    layers. A layer that shares two weights with different layers is two layers, each with a key.

    Args:
        key: name of the shared weight's owner among the tied modules.
        weight: path of the weight inside the layer.
        forward: called as forward(layer, x) in place of layer(x).
    """

    key: str
    weight: str
    forward: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class Layer:
    """A layer not built yet. Only the pipeline stage that owns it allocates its weights.

    Its index in the list is its number in the checkpoint (layer_03-model_00-...), and the
    name of its class is what --pp-partition-method matches: both are interfaces.

    Args:
        carried: names of the tensors of a `LayerInput` that are present after this layer, and
            travel between pipeline stages from there on; None: the same as before it.
        prefill_only: whether decode steps of generation skip this layer.
    """

    cls: type[nn.Module]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tie: Tie | None = None
    carried: tuple[str, ...] | None = None
    prefill_only: bool = False

    def build(self) -> nn.Module:
        """Return the layer itself, its weights allocated."""
        return self.cls(**self.kwargs)


class Block(nn.Module):
    """Transformer layer: the unit of activation checkpointing, of which each stage has one at least.

    It takes a `LayerInput`, computes the fields that it `replaces` and passes on the others but those
    that it `drops`, which no later layer reads.
    """

    replaces: tuple[str, ...] = ("hidden",)
    drops: tuple[str, ...] = ()

    def leave_sum_to(self, following: Any) -> None:
        """Leave the last addition of a residual to the layer that follows, if both can."""


Call = Callable[[Any], Any]
"""What a step becomes when it is built: a layer, or the function itself."""

Step = Layer | Callable[[Any], Any]
"""One entry of the list: a layer, or a function without weights such as a transpose."""


@dataclass(frozen=True)
class Recomputation:
    """Activation checkpointing: which blocks of a stage are computed again in backward.

    Args:
        groups: which of so many blocks make a group each, by their order.
        call: calls its first argument with the others and keeps those alone. It may empty them
            meanwhile, but for `shared`: those that later layers read too.
    """

    groups: Callable[[int], Iterable[range]]
    call: Callable[..., Any]

    def apply(self, calls: Sequence[Call]) -> list[Call]:
        """Join each group of blocks to one call that recomputes them; the other `calls` stay."""
        blocks = {i: call for i, call in enumerate(calls) if isinstance(call, Block)}
        joined: list[Call] = list(calls)
        for group in self.groups(len(blocks)):
            for run in _runs([[*blocks][i] for i in group]):
                inner = [blocks[index] for index in run]
                joined[run[0]] = partial(self._recompute, inner)
                joined[run[0] + 1 : run[-1] + 1] = [_nothing] * (len(run) - 1)
        return [call for call in joined if call is not _nothing]

    def _recompute(self, calls: Sequence[Block], inputs: LayerInput) -> LayerInput:
        """Return the output of `calls`."""
        named = inputs.tensors()
        drops = {name for call in calls for name in call.drops}
        replaces = {name for call in calls for name in call.replaces} - drops
        names = [name for name in named if name in replaces]
        shared = [x for name, x in named.items() if name not in replaces | drops]

        def run(*tensors: Tensor) -> Tensors:
            again = LayerInput.unpack(named, tensors).replace(shared=inputs.shared)
            output = in_turn(calls, again).tensors()
            # Checkpointing functions take and return tensors; other values stay outside.
            return tuple(output[name] for name in names) if len(names) > 1 else output["hidden"]

        changes: dict[str, Any] = dict.fromkeys(drops)
        changes |= LayerInput.unpack(
            names, self.call(run, *named.values(), shared=shared)
        ).tensors()
        return inputs.replace(**changes)


def link_blocks(calls: Sequence[Call]) -> None:
    """Let each layer leave its last addition to the next; not with ZeRO-3, which releases its bias."""
    for block, following in pairwise(calls):
        if isinstance(block, Block):
            block.leave_sum_to(following)


def in_turn(calls: Iterable[Call], inputs: Any) -> Any:
    """Pass `inputs` through every call in turn."""
    for call in calls:
        inputs = call(inputs)
    return inputs


def _nothing(inputs: Any) -> Any:
    return inputs


def _runs(indices: Iterable[int]) -> list[list[int]]:
    """Return `indices` cut where one does not follow the one before."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def carried_names(steps: Sequence[Step], index: int) -> tuple[str, ...]:
    """Return the names of the tensors that a pipeline stage beginning at `index` receives."""
    declared = [step.carried for step in steps[:index] if isinstance(step, Layer) and step.carried]
    return declared[-1] if declared else ("hidden",)


class SequentialModel(nn.Module):
    """The whole list in one module, tied layers once, with the pipeline's parameter names.

    Args:
        steps: the list.
        recomputation: which layers are computed again in backward; None for none.
        links: whether to `link_blocks`.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        *,
        recomputation: Recomputation | None = None,
        links: bool = False,
    ):
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        calls = [self._add(number, step) for number, step in enumerate(steps)]
        self.calls = recomputation.apply(calls) if recomputation else calls
        if links:
            link_blocks(self.calls)

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
