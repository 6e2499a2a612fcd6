"""Model runner: prefill, decode steps and log-probabilities with this rank's layers of a network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpointing.conversion.network import weights_of
from megatron.checkpointing.resharding.sharded_tensor import ParameterState, fill_from
from megatron.common.errors import CheckpointError, MegatronError
from megatron.config.architecture.architecture import network_of
from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE, Kernels
from megatron.inference.runner.decode_graphs import Capture, DecodeGraphs, StepShape, step_shape
from megatron.inference.runner.decode_states import DecodeStates
from megatron.inference.runner.device import to_device, without_cudnn_attention
from megatron.inference.runner.logprobs import TokenLogprob, logprob_columns, read_logprobs
from megatron.inference.runner.onednn_weights import pack_weights
from megatron.inference.runner.passes import Decode, Extend, Prefill
from megatron.model.gpt import to_batch_first
from megatron.model.layers.attention_kernels import core_attention_of
from megatron.model.layers.layer_input import LayerInput, PassInput
from megatron.model.layers.layer_list import (
    Block,
    Layer,
    SequentialModel,
    Step,
    in_turn,
)
from megatron.model.layers.parts import LayerParts
from megatron.tensor_parallel.collectives import all_gather
from megatron.tensor_parallel.object_collectives import broadcast_object
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import shard_of

Value = TypeVar("Value")

Contexts = Sequence[Sequence[int]]
"""Tokens of each of the texts that one sequence attends to in addition to its own."""

_HEAD_POSITIONS = 256
"""Positions whose logits are in memory at once when full texts are scored."""

_NO_LIMIT = 2**31
"""Most tokens of a sequence of a network without a limit."""

_KEY_ROUNDING = 256
"""Of the cached positions that a decode step reads on a GPU."""


class ModelRunner:
    """Runs this rank's pipeline stage and tensor-parallel shard of a network, with its states.

    Its layers are built with `DecodeStates`, which hold their state of earlier tokens: see
    `megatron.model.layers.parts`. The first layer reads the network's `batch`.

    Args:
        spec: the network; its padded vocabulary is a multiple of the tensor-parallel ranks.
        weights: unsharded, by name.
        groups: this rank's process groups; replicas do not communicate.
        dtype: of weights and activations.
        rows: rows of the states, most sequences at once; 0 to keep nothing.
        max_length: most tokens of a sequence (default: the network's maximum).
        sees_prefix: whether the tokens of a prompt attend to each other in both directions, as in
            a prefix language model.
        control: the ranks of `groups.model` over gloo, for messages (default: `groups.model`).
        key_rounding: the number of cached positions that a decode step reads is rounded up to a
            multiple of this, see `step_shape`; 1: none that is masked (default: 256 on GPUs, 1 on
            CPUs, which compute what they read).
        capture: captures decode steps of rounded shapes, to replay them (default: steps run as
            they are).
        packs_weights: whether weights on CPUs are packed for decode steps, see `pack_weights`.
        kernels: what computes the operations inside layers.

    `no_extension` is why `extend` is impossible; "" if it is possible.

    Raises:
        CheckpointError: the weights do not fit `spec`.
        ConfigError: the KV cache does not fit into memory.

    Communication: messages between the ranks; every rank must build one, in step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, ParameterState],
        *,
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
        rows: int,
        max_length: int | None = None,
        sees_prefix: bool = False,
        control: dist.ProcessGroup | None = None,
        key_rounding: int | None = None,
        capture: Capture | None = None,
        packs_weights: bool = True,
        kernels: Kernels = REFERENCE,
    ):
        self.spec, self.groups, self.dtype, self.device = spec, groups, dtype, device
        self.rows, self.sees_prefix = rows, sees_prefix
        self._control = control or groups.model
        default = _KEY_ROUNDING if device.type == "cuda" else 1
        # A plugin's attention gets the keys of each row, without padding.
        self._rounding = 1 if spec.attention.attention else key_rounding or default
        self.network = network_of(spec)
        limit = max_length or self.network.max_length(spec)
        self.max_length = limit or _NO_LIMIT
        self.states = DecodeStates(rows=rows, dtype=dtype, device=device) if rows else None
        parts = LayerParts(
            group=groups.tensor,
            core_attention=core_attention_of(spec),
            kernels=kernels,
            mixed=dtype != torch.float32,
            predicts=False,
            states=self.states,
        )
        steps: list[Step] = self.network.layers(spec, parts)
        is_block = [isinstance(step, Layer) and issubclass(step.cls, Block) for step in steps]
        start, stop = stage_bounds(is_block, groups.topology.pipeline)[groups.stage]
        stage_steps = [step if start <= i < stop else _pass_on for i, step in enumerate(steps)]
        model = SequentialModel(stage_steps, links=True).to(dtype).to(device)
        if self.states and limit:
            self.states.reserve(limit)
        fill_parameters(model, weights)
        if packs_weights:
            pack_weights(model)
        self.model = model.eval()
        end = steps.index(to_batch_first)
        self._body, self._head = model.calls[:end], model.calls[end + 1 :]
        self._decode_body = [
            call
            for step, call in zip(steps, self._body, strict=False)
            if not (isinstance(step, Layer) and step.prefill_only)
        ]
        self.no_extension = self._why_no_extension()
        self._graphs = None
        if capture and rows and self._rounding > 1 and not (self.states and self.states.grows):
            self._graphs = DecodeGraphs(
                self._decode, rows=rows, device=device, capture=capture, keeping=self._keeping
            )

    def _why_no_extension(self) -> str:
        """Return why `extend` is impossible on one of the stages; "" if it is possible.

        Communication: every rank must call this, in step.
        """
        why = ""
        if self.states is None:
            why = "sequences are recomputed for each token"
        elif self.sees_prefix:
            why = "tokens of a prompt attend to later ones"
        elif self.network.num_contexts(self.spec):
            why = "sequences attend to other texts, too"
        elif not self.states.by_token:
            why = "a layer keeps a state of each sequence"
        stages = range(self.groups.topology.pipeline)
        return max([self.broadcast(why, stage=stage) for stage in stages])

    @property
    def has_logits(self) -> bool:
        """Whether this rank's stage is the last one."""
        return self.groups.stage == self.groups.topology.pipeline - 1

    @torch.inference_mode()
    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        prefixes: Sequence[int],
        first: int = 0,
        *,
        contexts: Sequence[Contexts] = (),
        room: int = 0,
    ) -> Tensor:
        """Prefill: run sequences from their first token, with states in the rows from `first` on.

        Args:
            prefixes: number of prompt tokens of each sequence.
            contexts: texts that each sequence attends to in addition to its own; default: none.
            room: most tokens that a sequence will have, if the network has no limit.

        Shapes: returns the hidden states, the input of the head, [b, s, h], s the longest sequence;
            meaningful on the last stage only.
        Communication: every rank must call this, in step.
        """
        length = max(map(len, sequences))
        if self.states:
            self.states.reserve(max(length, min(room, self.max_length)))
            self.states.start(Prefill(first, [*map(len, sequences)]))
        tokens_bs = self._pad(sequences, length)
        positions_bs = torch.arange(length, device=self.device).expand_as(tokens_bs)
        tokens = PassInput(tokens_bs, positions_bs, is_decode=False)
        if self.sees_prefix:
            prefix_b1 = to_device(prefixes, self.device)[:, None]
            ends_bs = torch.maximum(positions_bs + 1, prefix_b1)
            spans_bs2 = torch.stack([torch.zeros_like(ends_bs), ends_bs], -1)
            tokens = tokens._replace(attention_span=spans_bs2)
        if count := self.network.num_contexts(self.spec):
            tokens = self._with_contexts(tokens, prefixes, contexts, count)
        return self._forward(tokens)

    def _with_contexts(
        self,
        tokens: PassInput,
        prefixes: Sequence[int],
        contexts: Sequence[Contexts],
        count: int,
    ) -> PassInput:
        """Add prompt lengths and `count` contexts of each sequence; further ones are dropped."""
        rows = [[*own[:count]] for own in contexts or [()] * len(prefixes)]
        texts = [text for own in rows for text in (*own, *[()] * (count - len(own)))]
        longest = max(1, *map(len, texts))
        lengths_e = to_device([*map(len, texts)], self.device)
        return tokens._replace(
            prompt_lengths=to_device(prefixes, self.device),
            contexts=self._pad(texts, longest).view(len(rows), count, longest),
            context_lengths=lengths_e.view(len(rows), count),
        )

    def _pad(self, rows: Sequence[Sequence[int]], length: int) -> Tensor:
        return to_device([[*row, *[0] * (length - len(row))] for row in rows], self.device)

    @torch.inference_mode()
    def extend(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        first: int = 0,
        *,
        room: int = 0,
    ) -> Tensor:
        """Extension: run further tokens of sequences, whose earlier ones are cached.

        Args:
            tokens: further tokens of each sequence, one at least.
            starts: number of cached tokens of each sequence.
            first: row of the states of the first sequence.
            room: as of `prefill`.

        Shapes: returns the hidden states [b, s, h], as `prefill` does; s the most further tokens.
        Communication: every rank must call this, in step.
        """
        assert self.states, "extensions need states"
        lengths = [*map(len, tokens)]
        tokens_bs = self._pad(tokens, max(lengths))
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        self.states.reserve(max(*ends, min(room, self.max_length)))
        steps_s = torch.arange(tokens_bs.size(1), device=self.device)
        # Padding has the last token's position, which the network has.
        positions_bs = torch.minimum(
            to_device(starts, self.device)[:, None] + steps_s,
            to_device(ends, self.device)[:, None] - 1,
        )
        by_row = len(tokens) == 1 or bool(self.spec.attention.attention)
        self.states.start(Extend(first, starts, lengths, positions_bs, by_row=by_row))
        return self._forward(PassInput(tokens_bs, positions_bs, is_decode=False))

    @torch.inference_mode()
    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        behind: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Decode step: run one more token of each sequence, in the first rows of the states.

        Args:
            behind: cached tokens of the rows behind these, which padding may compute again.

        Shapes: returns the hidden states [b, 1, h], as `prefill` does.
        Communication: every rank must call this, in step.
        """
        assert self.states, "decode steps need states"
        shape = step_shape(
            positions,
            rounding=self._rounding,
            rows=self.rows,
            max_length=self.states.capacity,
            has_windows=bool(self.spec.attention.window),
        )
        # Rows of padding compute a cached token again, or one behind them that later passes overwrite.
        at = shape.start
        cached = [*behind, *[()] * shape.rows][: shape.rows - len(tokens)]
        padding = [row[at] if at < len(row) else 0 for row in cached]
        inputs_2b = to_device(
            [[*tokens, *padding], [*positions, *[at] * len(padding)]], self.device
        )
        if self._graphs:
            return self._graphs(inputs_2b, shape)[: len(tokens)]
        lengths = [position + 1 for position in positions] if self.spec.attention.attention else ()
        return self._decode(inputs_2b, shape, lengths)[: len(tokens)]

    def _decode(self, inputs_2b: Tensor, shape: StepShape, lengths: Sequence[int] = ()) -> Tensor:
        assert self.states, "decode steps need states"
        tokens_b, positions_b = inputs_2b
        self.states.start(Decode(positions_b, shape, lengths=lengths))
        return self._forward(PassInput(tokens_b[:, None], positions_b[:, None], is_decode=True))

    def _keeping(self) -> AbstractContextManager[None]:
        return self.states.restore_after() if self.states else nullcontext()

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of the tokenizer's vocabulary.

        Shapes: features [n, h] -> [n, V] float32, without the padded tokens.
        Communication: an all-gather over the tensor group; all ranks of the last stage only.
        """
        logits = in_turn(self._head, features[:, None])[:, 0]
        if self.groups.topology.tensor > 1:
            logits = all_gather(logits, 1, self.groups.tensor)
        return logits[:, : self.spec.vocabulary.vocab_size].float()

    def nonfinite_logits_error(self) -> MegatronError:
        """Return the error for logits that are NaN or infinite."""
        return nonfinite_logits_error(self.dtype)

    @torch.inference_mode()
    def logprobs(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the log-probability of each token, and whether it was the most likely.

        Shapes: features [n, h] of the positions before the n tokens -> [n, 2] float64, the second
            column 1 or 0.
        Communication: as `logits`.
        """
        found = []
        for logits, ids in self._logits_in_chunks(features, tokens):
            logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
            found.append(torch.stack([logprobs.double(), (logits.argmax(-1) == ids).double()], -1))
        return torch.cat(found)

    @torch.inference_mode()
    def token_logprobs(
        self, features: Tensor, tokens: Sequence[int], *, top_logprobs: int
    ) -> list[TokenLogprob]:
        """Return the log-probability of each token, and the most likely tokens at its position.

        Shapes: features [n, h] of the positions before the n tokens.
        Communication: as `logits`.
        """
        return [
            read_logprobs(int(token), columns, top_logprobs)
            for logits, ids in self._logits_in_chunks(features, tokens)
            for token, *columns in torch.cat(
                [ids[:, None], logprob_columns(logits, ids, top_logprobs)], 1
            ).tolist()
        ]

    def _logits_in_chunks(
        self, features: Tensor, tokens: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits of a few positions at a time, and the tokens that follow them."""
        for part, ids in zip(
            features.split(_HEAD_POSITIONS),
            to_device(tokens, self.device).split(_HEAD_POSITIONS),
            strict=True,
        ):
            yield self.logits(part), ids

    def run_on_last_stage(self, function: Callable[[], Value]) -> Value:
        """Call `function` on the last stage, which has the logits; return its result on every rank.

        Communication: `function` runs on all ranks of the last stage; one broadcast to all stages.
        """
        value = function() if self.has_logits else None
        return self.broadcast(value, stage=self.groups.topology.pipeline - 1)  # type: ignore[return-value]

    def broadcast(self, value: Value, *, stage: int) -> Value:
        """Return the `value` of the first rank of `stage` on every rank of the replica.

        Communication: one broadcast over gloo when there are several ranks.
        """
        world = self.groups.topology
        if world.pipeline * world.tensor == 1:
            return value
        source = world.rank(pipeline=stage, data=self.groups.data_rank, tensor=0)
        return broadcast_object(value, source=source, group=self._control)

    @without_cudnn_attention()
    def _forward(self, tokens: PassInput) -> Tensor:
        if self.groups.stage == 0:
            inputs: Any = self.network.batch(self.spec, tokens)
        else:
            batch, length = tokens.tokens.shape
            wide = torch.float32 if self.spec.fp32_residual else self.dtype
            x_sbh = torch.empty(
                (length, batch, self.spec.hidden_size), dtype=wide, device=self.device
            )
            dist.recv(x_sbh, self._neighbour(-1))
            read = self.spec.positions.reach_attention
            inputs = LayerInput(x_sbh, tokens.positions if read else None, tokens.attention_span)
        x_sbh = in_turn(self._decode_body if tokens.is_decode else self._body, inputs).hidden
        if not self.has_logits:
            dist.send(x_sbh.contiguous(), self._neighbour(1))
        return x_sbh.transpose(0, 1)

    def _neighbour(self, way: int) -> int:
        return self.groups.topology.rank(
            pipeline=self.groups.stage + way,
            data=self.groups.data_rank,
            tensor=self.groups.tensor_rank,
        )


def stage_bounds(is_block: Sequence[bool], stages: int) -> list[tuple[int, int]]:
    """Split the layer list over pipeline stages; their numbers of blocks differ by at most one.

    >>> stage_bounds([False, True, True, True, False], 2)
    [(0, 2), (2, 5)]
    """
    blocks = [i for i, block in enumerate(is_block) if block]
    cuts = [blocks[stage * len(blocks) // stages] for stage in range(1, stages)]
    return list(pairwise([0, *cuts, len(is_block)]))


def _pass_on(inputs: Any) -> Any:
    """Replace a layer of another stage in the list, so that the parameter names stay."""
    return inputs


def nonfinite_logits_error(dtype: torch.dtype) -> MegatronError:
    """Return the error for logits that are NaN or infinite."""
    why = "its weights are NaN or infinite, or an activation overflows"
    if dtype != torch.float32:
        why += f" in {str(dtype).removeprefix('torch.')}: try --inference-dtype fp32"
    return MegatronError(f"the network's logits are NaN or infinite: {why}")


def fill_parameters(model: SequentialModel, weights: Mapping[str, ParameterState]) -> None:
    """Copy this rank's shards of the unsharded `weights` into `model`, and the biases of its routers.

    Raises:
        CheckpointError: a weight is missing or has another shape.
    """
    for name, parameter in weights_of(model).items():
        if name not in weights:
            raise CheckpointError(
                f"the checkpoint has no weight {name}: it was saved by a run of another model"
            )
        shard, full = shard_of(parameter), weights[name].weight
        if name.endswith(("word_embeddings.weight", "output_bias")) and shard:
            # The padded vocabulary depends on the number of tensor-parallel ranks.
            full = full.with_rows(parameter.size(0) * shard.count)
        try:
            fill_from(parameter.data.view(-1), full, shard, parameter.shape)
        except ValueError as error:
            raise CheckpointError(f"weight {name} of the checkpoint: {error}") from error
