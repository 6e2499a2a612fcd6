"""Runner of encoders, and an engine that serves their requests one by one."""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.checkpointing.resharding.sharded_tensor import ParameterState
from megatron.common.errors import ConfigError, MegatronError
from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.inference.engine.continuous_batching import ExclusiveRequest
from megatron.inference.engine.sequence import Counters, Event, Request
from megatron.inference.runner.model_runner import fill_parameters, nonfinite_logits_error
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_list import SequentialModel, Step
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.collectives import all_gather
from megatron.tensor_parallel.object_collectives import broadcast_object
from megatron.tensor_parallel.process_groups import Groups

Value = TypeVar("Value")


class EncoderRunner:
    """Holds this rank's tensor-parallel shard of a network without pipeline stages, in eval mode.

    Args:
        spec: the network.
        weights: unsharded, by name.
        layers: returns the layers of the network, by spec and parts.
        groups: this rank's process groups, of one pipeline stage.
        dtype: of weights and activations.
        kernels: what computes the operations inside layers.

    Raises:
        CheckpointError: the weights do not fit `spec`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, ParameterState],
        *,
        layers: Callable[..., list[Step]],
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels = REFERENCE,
    ):
        self.groups, self.dtype, self.device = groups, dtype, device
        # Ranks get equal shards of the vocabulary; the padding has no token.
        vocabulary = spec.vocabulary.in_equal_shards(groups.topology.tensor)
        self.spec = replace(spec, vocabulary=vocabulary)
        parts = LayerParts(
            group=groups.tensor,
            core_attention=core_attention_of(spec),
            kernels=kernels,
            mixed=dtype != torch.float32,
        )
        self.model = SequentialModel(layers(self.spec, parts)).to(dtype).to(device).eval()
        fill_parameters(self.model, weights)

    def full_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of the tokenizer's vocabulary.

        Shapes: [..., V/t] -> [..., V] float32, without the padded tokens.
        Communication: an all-gather over the tensor group.
        """
        if self.groups.topology.tensor > 1:
            logits = all_gather(logits.contiguous(), logits.dim() - 1, self.groups.tensor)
        return logits[..., : self.spec.vocabulary.vocab_size].float()

    def broadcast(self, value: Value) -> Value:
        """Return the `value` of the first rank on every rank.

        Communication: one broadcast over gloo when there are several ranks.
        """
        if self.groups.topology.tensor == 1:
            return value
        return broadcast_object(value, source=0, group=self.groups.model)

    def nonfinite_logits_error(self) -> MegatronError:
        """Return the error for logits that are NaN or infinite."""
        return nonfinite_logits_error(self.dtype)


def run_to_end(
    steps: Generator[None, None, list[Value]], should_continue: Callable[[], bool] = lambda: True
) -> list[Value]:
    """Run the steps of a request, and return its results; [] if it is cancelled.

    Args:
        should_continue: called after each step; if False, the request is cancelled.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: list[Value] = end.value
            return found
        if not should_continue():
            return []


_CLOSE = "close"
"""Message that ends `SerialEngine.follow`."""


class SerialEngine:
    """Serves the exclusive requests of an encoder, one after the other.

    Requests run on the first rank, which is closed in the end; the other ranks `follow()`.

    Args:
        runner: the network.
        model: argument of `ExclusiveRequest.run` (default: the runner).
    """

    is_busy = False

    def __init__(self, runner: EncoderRunner, model: Any = None):
        self.runner, self.rows = runner, 1
        self.max_length = runner.spec.positions.max_position_embeddings
        self._model: Any = runner if model is None else model
        self.counters = Counters()
        self._is_open = True

    def problems(self, request: Request) -> Iterator[str]:
        """Yield why the network does not continue a prompt."""
        yield f"a {self.runner.spec.architecture.upper()} does not continue prompts"

    def add(self, request: Request) -> int:
        """Refuse a prompt.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(*self.problems(request))

    def cancel(self, request_id: int) -> None:
        """Do nothing: there are no sequences to cancel."""

    def step(self) -> list[Event]:
        """Keep the other ranks from timing out."""
        self.runner.broadcast(None)
        return []

    def run_alone(
        self, request: ExclusiveRequest[Any], should_continue: Callable[[], bool] = lambda: True
    ) -> list[Any]:
        """Run a request on all ranks, and return its results.

        Args:
            should_continue: called after each step; if False, the request is cancelled and has no
                results.

        Raises:
            MegatronError: the logits are NaN or infinite.
        """
        self.runner.broadcast(request)
        return self._run(request, should_continue)

    def follow(self) -> None:
        """Take part in the requests of the first rank until its engine is closed."""
        while (message := self.runner.broadcast(None)) != _CLOSE:
            if isinstance(message, ExclusiveRequest):
                with suppress(MegatronError):  # the first rank reports it
                    self._run(message)

    def close(self) -> None:
        """End `follow` on the other ranks."""
        if self._is_open:
            self._is_open = False
            self.runner.broadcast(_CLOSE)

    def _run(
        self, request: ExclusiveRequest[Any], should_continue: Callable[[], bool] = lambda: True
    ) -> list[Any]:
        steps = request.run(self._model)
        return run_to_end(steps, lambda: self.runner.broadcast(should_continue()))
