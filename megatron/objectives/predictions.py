"""Predictions of the samples that are evaluated."""

from torch import Tensor

from megatron.tensor_parallel.broadcast import Batch


class Predictions:
    """Logits of the samples that are evaluated, recorded where the loss is computed."""

    def __init__(self) -> None:
        self._is_on = False
        self._rows: list[tuple[Tensor, Tensor]] = []

    def start(self) -> None:
        """Record from now on; what was recorded is dropped."""
        self._is_on, self._rows = True, []

    def add(self, logits_bc: Tensor, batch: Batch) -> None:
        """Record the logits of a micro-batch, without its padding, while recording is on."""
        if self._is_on:
            counts = batch["weight"] > 0
            self._rows.append((batch["index"][counts], logits_bc[counts].detach()))

    def stop(self) -> list[tuple[int, list[float]]]:
        """Return the sample numbers and logits recorded on this rank, and stop recording."""
        self._is_on = False
        rows = [
            (index, logits)
            for indices, logits_bc in self._rows
            for index, logits in zip(indices.tolist(), logits_bc.tolist(), strict=True)
        ]
        self._rows = []
        return rows
