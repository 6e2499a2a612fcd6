"""One rank's layers of a trained GPT, ready to read prompts and to go on token by token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.checkpointing.resharding.sharded_tensor import ParameterState, fill_from
from megatron.common.errors import CheckpointError, MegatronError
from megatron.config.network.model_spec import ModelSpec
from megatron.fused_kernels.reference.dispatch import REFERENCE
from megatron.inference.engine.kv_cache import Cache, NextTokens, Prompts
from megatron.inference.engine.logprobs import choices_with_logprobs
from megatron.inference.engine.onednn_weights import pack_weights
from megatron.inference.engine.request import Choice
from megatron.model.gpt import gpt_layers, to_batch_first
from megatron.model.layers.attention_kernels import attention_of
from megatron.model.layers.layer_input import LayerInput
from megatron.model.layers.layer_list import SequentialModel, in_turn
from megatron.model.layers.transformer_block import ParallelTransformerLayerPipe
from megatron.tensor_parallel.collectives import all_gather
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.rng import OrdinaryStream
from megatron.tensor_parallel.sharding import exact_quotient, shard_of

Decision = TypeVar("Decision")
Value = TypeVar("Value")

_HEAD_POSITIONS = 256
"""Positions whose logits are in memory at once when those of whole texts are looked at."""


class Stage:
    """This rank's part of the network, its weights, and its part of the cache.

    Args:
        spec: the network; its padded vocabulary is a multiple of the tensor-parallel ranks.
        weights: whole ones, by name.
        groups: this rank's place; each replica works for itself.
        dtype: of weights and activations.
        rows: most sequences at once; 0 for none that are kept.
        max_length: most tokens of a sequence; None for as many as there are positions.
        sees_prefix: whether the tokens of a prompt see each other, as in a prefix language model.

    Raises:
        CheckpointError: the weights are not those of `spec`.
        ConfigError: keys and values do not fit into memory, or the network has experts.
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
    ):
        self.spec, self.groups, self.dtype, self.device = spec, groups, dtype, device
        self.rows, self.sees_prefix = rows, sees_prefix
        self.max_length = max_length or spec.max_position_embeddings
        parts: dict[str, Any] = {
            "group": groups.tensor,
            "rng": OrdinaryStream(),
            "mixed": dtype != torch.float32,
        }
        steps = gpt_layers(spec, **parts)
        is_block = [getattr(step, "cls", None) is ParallelTransformerLayerPipe for step in steps]
        start, stop = stage_bounds(is_block, groups.topology.pipeline)[groups.stage]
        self.cache = None
        if rows:
            first = 1 + sum(is_block[:start])
            self.cache = Cache(
                range(first, first + sum(is_block[start:stop])),
                groups=exact_quotient(
                    spec.num_query_groups, groups.tensor.size(), "num_query_groups"
                ),
                head_dim=spec.head_dim,
                rows=rows,
                max_length=self.max_length,
                dtype=dtype,
                device=device,
            )
            attend = attention_of(REFERENCE, caps=spec.attention_softcap > 0)
            steps = gpt_layers(spec, **parts, core_attention=self.cache.core_attention(attend))
        own = [step if start <= i < stop else _pass_on for i, step in enumerate(steps)]
        model = SequentialModel(own).to(dtype).to(device)
        _fill(model, weights)
        pack_weights(model)
        self.model = model.eval()
        end = steps.index(to_batch_first)
        self._body, self._head = model.calls[:end], model.calls[end + 1 :]

    @property
    def has_logits(self) -> bool:
        """Whether this rank's stage is the last one."""
        return self.groups.stage == self.groups.topology.pipeline - 1

    @torch.inference_mode()
    def read(
        self, sequences: Sequence[Sequence[int]], prefixes: Sequence[int], first: int = 0
    ) -> Tensor:
        """Read sequences from their beginnings, and keep them in the rows from `first` on.

        Args:
            prefixes: how many tokens of each are its prompt.

        Shapes: returns what the head makes logits of, [b, s, h], s the longest sequence; nothing
            of use on stages without a head.
        Communication: every rank must call this, in step.
        """
        if self.cache:
            self.cache.turn = Prompts(first)
        length = max(map(len, sequences))
        tokens_bs = torch.tensor(
            [[*tokens, *[0] * (length - len(tokens))] for tokens in sequences], device=self.device
        )
        positions_bs = torch.arange(length, device=self.device).expand_as(tokens_bs)
        spans_bs2 = None
        if self.sees_prefix:
            prefix_b1 = torch.tensor(prefixes, device=self.device)[:, None]
            ends_bs = torch.maximum(positions_bs + 1, prefix_b1)
            spans_bs2 = torch.stack([torch.zeros_like(ends_bs), ends_bs], -1)
        return self._forward(tokens_bs, positions_bs, spans_bs2)

    @torch.inference_mode()
    def go_on(self, tokens: Sequence[int], places: Sequence[int]) -> Tensor:
        """Read one token more in each of the first rows.

        Args:
            places: the positions of the tokens.

        Shapes: returns [b, 1, h] as `read` does.
        Communication: every rank must call this, in step.
        """
        assert self.cache, "a stage without rows goes on with nothing"
        self.cache.turn = turn = NextTokens(places, max_length=self.max_length, device=self.device)
        tokens_b1 = torch.tensor(tokens, device=self.device)[:, None]
        return self._forward(tokens_b1, turn.places[:, None], None)

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of the real vocabulary at the given positions.

        Where some are not finite no token is likelier than another: see `no_numbers`.

        Shapes: features [n, h] -> [n, V] float32, without the padded tokens.
        Communication: an all-gather over the tensor group; only the last stage may call this.
        """
        found = in_turn(self._head, features[:, None])[:, 0]
        if self.groups.topology.tensor > 1:
            found = all_gather(found, 1, self.groups.tensor)
        return found[:, : self.spec.vocab_size].float()

    def no_numbers(self) -> MegatronError:
        """Return the error of logits that are not finite."""
        why = "its weights are, or what it computes is too large"
        if self.dtype != torch.float32:
            why += " for 16 bits: with --inference-dtype fp32 it computes in 32"
        return MegatronError(f"the network's logits are NaN or infinite; {why}")

    @torch.inference_mode()
    def judged(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """Return the log-probability of each token, and whether it was the likeliest.

        Shapes: features [n, h] of the positions before the n tokens -> [n, 2] float64, the second
            column 1 or 0.
        Communication: as `logits`.
        """
        found = []
        for logits, ids in self._logits_in_parts(features, tokens):
            own = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
            found.append(torch.stack([own.double(), (logits.argmax(-1) == ids).double()], -1))
        return torch.cat(found)

    @torch.inference_mode()
    def prompt_choices(
        self, features: Tensor, tokens: Sequence[int], *, top_logprobs: int
    ) -> list[Choice]:
        """Return the log-probability of each token, and the likeliest tokens at its position.

        Shapes: features [n, h] of the positions before the n tokens.
        Communication: as `logits`.
        """
        return [
            choice
            for logits, ids in self._logits_in_parts(features, tokens)
            for choice in choices_with_logprobs(
                logits.log_softmax(-1), ids.tolist(), [top_logprobs] * len(ids)
            )
        ]

    def _logits_in_parts(
        self, features: Tensor, tokens: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the logits of a few positions at a time, and the tokens that follow them."""
        for part, ids in zip(
            features.split(_HEAD_POSITIONS),
            torch.tensor(tokens, device=self.device).split(_HEAD_POSITIONS),
            strict=True,
        ):
            yield self.logits(part), ids

    def decided(self, decide: Callable[[], Decision]) -> Decision:
        """Return on every rank of the replica what `decide` returns where the logits are.

        Communication: `decide` runs on all ranks of the last stage; one broadcast to all stages.
        """
        decision = decide() if self.has_logits else None
        return self.shared(decision, stage=self.groups.topology.pipeline - 1)  # type: ignore[return-value]

    def shared(self, value: Value, *, stage: int) -> Value:
        """Return the `value` of the first rank of `stage` on every rank of the replica.

        Communication: one broadcast when there are several ranks.
        """
        world, box = self.groups.topology, [value]
        if world.pipeline * world.tensor > 1:
            source = world.rank(pipeline=stage, data=self.groups.data_rank, tensor=0)
            dist.broadcast_object_list(box, src=source, group=self.groups.model, device=self.device)
        return box[0]

    def _forward(self, tokens_bs: Tensor, positions_bs: Tensor, spans_bs2: Tensor | None) -> Tensor:
        if self.groups.stage == 0:
            inputs: Any = {"tokens": tokens_bs, "positions": positions_bs}
            if spans_bs2 is not None:
                inputs["attention_span"] = spans_bs2
        else:
            batch, length = tokens_bs.shape
            wide = torch.float32 if self.spec.fp32_residual else self.dtype
            x_sbh = torch.empty(
                (length, batch, self.spec.hidden_size), dtype=wide, device=self.device
            )
            dist.recv(x_sbh, self._neighbour(-1))
            read = self.spec.layers_read_positions
            inputs = LayerInput(x_sbh, positions_bs if read else None, spans_bs2)
        x_sbh = in_turn(self._body, inputs).hidden
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
    """Return which entries of the list each stage has: as many blocks as any other, or one less.

    >>> stage_bounds([False, True, True, True, False], 2)
    [(0, 2), (2, 5)]
    """
    blocks = [i for i, block in enumerate(is_block) if block]
    cuts = [blocks[stage * len(blocks) // stages] for stage in range(1, stages)]
    return list(pairwise([0, *cuts, len(is_block)]))


def _pass_on(inputs: Any) -> Any:
    """Return the inputs; replaces layers of other stages in the list, so that numbers stay."""
    return inputs


def _fill(model: SequentialModel, weights: Mapping[str, ParameterState]) -> None:
    for name, parameter in model.named_parameters():
        if name not in weights:
            raise CheckpointError(
                f"the checkpoint has no weight {name}, so it is of another network"
            )
        shard, whole = shard_of(parameter), weights[name].weight
        if "word_embeddings.weight" in name and shard:
            # The padding may be another one for so many ranks.
            whole = whole.with_rows(parameter.size(0) * shard.count)
        try:
            fill_from(parameter.data.view(-1), whole, shard, parameter.shape)
        except ValueError as error:
            raise CheckpointError(f"weight {name} of the checkpoint: {error}") from error
