"""Terms of a loss by name: recorded on the ranks that compute it, averaged on all ranks."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.common.errors import ConfigError
from megatron.model.loss import Loss
from megatron.tensor_parallel.broadcast import Batch


class LossTerms:
    """A loss of one scalar for DeepSpeed, which records the terms of each micro-batch.

    Args:
        loss: returns a scalar, or a scalar with its terms.
        names: of the terms, known on every pipeline stage; empty for a loss without terms.
    """

    def __init__(self, loss: Loss, names: Sequence[str] = ()):
        self._loss, self.names = loss, tuple(names)
        self._micro_batches: list[Tensor] = []

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """Return the scalar that is trained.

        Raises:
            ConfigError: the loss of a plugin is no scalar, or its terms are not those of `names`.
        """
        value = self._loss(output, batch)
        total, terms = (value, {}) if isinstance(value, Tensor) else value
        if total.dim() > 0:
            raise ConfigError(
                f"the objective's loss has the shape {list(total.shape)}: it must be a scalar, such "
                "as the mean over the tokens that count"
            )
        if terms.keys() != set(self.names):
            raise ConfigError(
                f"the objective's loss returns {_join_names(terms)}, and its loss_terms() names "
                f"{_join_names(self.names)}: they must be the same"
            )
        if terms:
            values = [terms[name].detach().float() for name in self.names]
            self._micro_batches.append(torch.stack(values))
        return total

    def take(self, device: torch.device) -> dict[str, float]:
        """Return the mean of each term over the micro-batches since the last call, on all ranks.

        Communication: one all-reduce of a few numbers over all ranks, if there are terms.
        """
        if not self.names:
            return {}
        sums = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=device)
        if self._micro_batches:
            sums[1:] = torch.stack(self._micro_batches).sum(0)
        sums[0] = len(self._micro_batches)
        self._micro_batches.clear()
        # Tensor-parallel ranks have equal terms, other pipeline stages none.
        dist.all_reduce(sums)
        return dict(zip(self.names, (sums[1:] / sums[0]).tolist(), strict=True))


def _join_names(names: Iterable[str]) -> str:
    return f"the terms {', '.join(names)}" if names else "no terms"
