"""ZeRO stage 3 from the first weight on: no rank ever holds the whole model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
from torch import nn

from megatron.engine.deepspeed.mpu import Mpu
from megatron.tensor_parallel.process_groups import Groups


def divided_from_birth(groups: Groups, config: dict[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which every layer that is built keeps this replica's share of its weights.

    Args:
        config: DeepSpeed's JSON.

    Communication: within it, every data-parallel rank must build the same layers in step.
    """
    return deepspeed.zero.Init(
        data_parallel_group=groups.data_and_sequence, config_dict_or_path=config, mpu=Mpu(groups)
    )


class Opened(nn.Module):
    """`model` with parameters that are whole while one looks at them, one at a time.

    What is written into a parameter meanwhile stays; parameters that are whole anyway are given as
    they are.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and parameter; the next one closes it.

        Communication: every data-parallel rank must do this in step; one gathering of each
        divided parameter.
        """
        for name, parameter in self.model.named_parameters(*args, **kwargs):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                yield name, parameter
