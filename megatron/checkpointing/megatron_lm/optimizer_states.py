"""Read Adam's states in Megatron-LM's distributed checkpoints: a tensor for each parameter and state."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.megatron_lm.detect import RESHARDABLE
from megatron.checkpointing.megatron_lm.distributed_files import StoredTensor
from megatron.checkpointing.parameter_names import is_buffer

_NAME = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(\w+)\.(.+)|.+)")
_STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_WEIGHTS = {"param": "fp32", "fp32_param": "fp32"}
"""Names of the master weight: of the distributed optimizer, and of the other one for 16-bit weights."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStates:
    """Optimizer states of a checkpoint.

    Args:
        tensors: states by parameter; {} if they are not read.
        steps: optimizer steps taken; None if states are not read.
        notice: why states in the files are not read; "" if they are, or if there are none.
    """

    tensors: Mapping[str, Mapping[str, StoredTensor]]
    steps: float | None = None
    notice: str = ""


def is_of_optimizer(name: str) -> bool:
    """Whether a tensor in the files is the optimizer's."""
    return _NAME.fullmatch(name) is not None


def states_in(tensors: Mapping[str, StoredTensor], common: Mapping[str, Any]) -> OptimizerStates:
    """Return the states of all parameters, or why they are not read.

    Args:
        tensors: in the files, by name.
        common: content without tensors, with the number of steps.
    """
    own = {name: match for name in tensors if (match := _NAME.fullmatch(name))}
    if not own:
        return OptimizerStates(tensors={})
    states: dict[str, dict[str, StoredTensor]] = {}
    for name, match in own.items():
        if state := (_STATES | _WEIGHTS).get(match[1]):
            states.setdefault(match[2], {})[state] = tensors[name]
    steps = max(_steps(common.get("optimizer")), default=0.0)
    problem = next(_problems(tensors, states, [match[1] for match in own.values()]), "")
    if not problem and steps < 1:
        problem = "the number of steps is not in the files"
    if problem:
        notice = f"only weights are loaded, without optimizer states: {problem}"
        return OptimizerStates(tensors={}, notice=notice)
    return OptimizerStates(tensors=states, steps=steps)


def _problems(
    tensors: Mapping[str, StoredTensor],
    states: Mapping[str, Mapping[str, StoredTensor]],
    kinds: list[str | None],
) -> Iterator[str]:
    """Yield why these are not Adam's states of every parameter.

    Args:
        kinds: states in the files, by their names there; None for other tensors of the optimizer.
    """
    if None in kinds:
        yield (
            "they are not stored by parameter (dp_reshardable), so only the layout that saved them "
            f"loads them; to go on with them, load the checkpoint in Megatron-LM and save it with "
            f"{RESHARDABLE}"
        )
    if others := sorted({kind for kind in kinds if kind and kind not in _STATES | _WEIGHTS}):
        yield f"they are not those of Adam, but {', '.join(others)}"
    for name, tensor in tensors.items():
        if is_of_optimizer(name) or is_buffer(name):
            continue
        own = states.get(name, {})
        if missing := _STATES.keys() - own.keys():
            yield f"{' and '.join(sorted(missing))} of {name} are missing"
        for state, found in own.items():
            if found.shape != tensor.shape:
                yield (
                    f"{state} of {name} is {list(found.shape)}, and the weight is "
                    f"{list(tensor.shape)}; save the checkpoint with {RESHARDABLE}"
                )


def _steps(content: Any) -> Iterator[float]:
    """Yield the numbers of steps in an optimizer's state without its tensors, or in several."""
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if key in ("step", "common_step"):
            yield float(value or 0)
        else:
            yield from _steps(value)
    for part in content if isinstance(content, list | tuple) else ():
        yield from _steps(part)
