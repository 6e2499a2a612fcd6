"""ZeRO stage 3: partition weights while layers are built; gather them for initialization."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import deepspeed
from torch import nn

from megatron.engine.deepspeed.mpu import Mpu
from megatron.tensor_parallel.process_groups import Groups


def zero3_init(groups: Groups, config: dict[str, Any]) -> AbstractContextManager[None]:
    """Partition the weights of every layer that is built inside the `with` block (zero.Init).

    Args:
        config: DeepSpeed's JSON.

    Communication: within it, every data-parallel rank must build the same layers in step.
    """
    return deepspeed.zero.Init(
        data_parallel_group=groups.data_and_sequence, config_dict_or_path=config, mpu=Mpu(groups)
    )


class GatheredModel(nn.Module):
    """`model` whose `named_parameters` gathers one partitioned parameter at a time.

    What is written into a gathered parameter is kept; parameters that are not partitioned are
    yielded as they are.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name and gathered parameter; the next one partitions it again.

        Communication: every data-parallel rank must do this in step; one all-gather of each
        partitioned parameter.
        """
        for name, parameter in self.model.named_parameters(*args, **kwargs):
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                yield name, parameter
