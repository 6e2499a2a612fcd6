"""Training engine around DeepSpeed: train and evaluate batches, save and load checkpoints."""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor, nn

from megatron.checkpointing.resharding.sharded_tensor import (
    BUFFER_BYTES,
    OPTIMIZER_NAMES,
    FullCheckpoint,
)
from megatron.common.errors import CheckpointError
from megatron.engine.deepspeed.grad_stats import (
    HostScalars,
    ZeroCounter,
    clip_gradients,
    params_norm,
    take_norm_of_all_ranks,
    watch_replicated_weights,
)
from megatron.engine.deepspeed.overlap import (
    GradientReduction,
    ParameterGather,
    gather_beside_forward,
    reduce_beside_backward,
)
from megatron.engine.deepspeed.patches.checkpoint_files import (
    files_by_name,
    log_failed_script_copies,
)
from megatron.engine.deepspeed.patches.experts import without_expert_files
from megatron.engine.deepspeed.patches.grad_norm import (
    read_norm_once,
    replace_fp32_clipping,
    wrap_step,
)
from megatron.engine.deepspeed.patches.grad_reduction import (
    keeps_reduced_partition,
    reduced_partition,
    shorten_gradient_path,
    skip_allreduce,
    skip_lone_all_reduce,
)
from megatron.engine.deepspeed.recompute import (
    restore_streams,
    seed_streams,
    stream_states,
)
from megatron.engine.deepspeed.skip_nonfinite import SkipNonfinite, is_finite
from megatron.engine.deepspeed.timers import Timers
from megatron.engine.deepspeed.universal import load_full, names_of_states
from megatron.engine.experts import ExpertBalance, average_experts, save_experts
from megatron.engine.loss_terms import LossTerms
from megatron.engine.optimizers import constants_of, forget_moments, put_constants
from megatron.engine.token_counts import TokenCounts
from megatron.model.layers.moe_aux_loss import AuxiliaryLoss, ExpertLoad
from megatron.tensor_parallel.broadcast import Batch
from megatron.tensor_parallel.object_collectives import all_gather_objects
from megatron.tensor_parallel.process_groups import Groups
from megatron.tensor_parallel.sharding import (
    all_reduce_partial_gradients,
    all_reduce_parts,
    gradient_group,
    shard_of,
)

Write = Callable[[Any, Path], None]
"""Writes a state to a file as torch.save does, at once or later; see checkpointing/writer.py."""

Read = Callable[[Path, Any], Any]
"""Reads a file, its tensors to torch.load's `map_location`; runs no code that the file asks for. See
checkpointing/resharding/unpickle.py."""


class StateFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine: files are written by `write` and read by `read`."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "StateFiles"
        self.write: Write = torch.save
        self.read: Read | None = None

    def create(self, info: CheckpointCommitInfo) -> None:
        """Do nothing: the folder exists."""

    def save(self, state_dict: Any, path: str) -> None:
        """Write `state_dict`, at once or later."""
        self.write(state_dict, Path(path))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file."""
        assert self.read
        return self.read(Path(path), map_location)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Do nothing: a checkpoint counts when it is published."""
        return True


class Engine(ABC):
    """A model in training: DeepSpeed's engine. Subclasses differ in how a batch passes through it."""

    def __init__(
        self,
        engine: Any,
        groups: Groups,
        *,
        timers: Timers,
        counts_zeros: bool,
        num_padding: int,
        terms: LossTerms,
        auxiliary: AuxiliaryLoss | None = None,
        sequence_parallel: bool = False,
        counts: TokenCounts | None = None,
    ):
        self._engine = engine
        self._terms, self._counts = terms, counts
        self._balance = auxiliary and ExpertBalance(
            engine.module, groups, auxiliary, sequence_parallel=sequence_parallel
        )
        self._expert_load: ExpertLoad | None = None
        self._groups = groups
        self._timers = timers
        self._files = engine.checkpoint_engine = StateFiles()
        log_failed_script_copies(engine)
        # Before the gradient is looked at: what clips it is called by the optimizer's own step.
        self._zeros = ZeroCounter(engine, groups, num_padding) if counts_zeros else None
        self._nonfinite: SkipNonfinite | None = None
        self._scalars = HostScalars()
        self._reduction: GradientReduction | None = None
        self._gather: ParameterGather | None = None
        if engine.basic_optimizer is None:
            # DeepSpeed may have one of its own around it all the same.
            return
        self._nonfinite = SkipNonfinite(engine, engine.basic_optimizer)
        shorten_gradient_path(engine.optimizer)
        skip_lone_all_reduce(engine)
        self._reduction = reduce_beside_backward(engine, groups)
        self._gather = gather_beside_forward(engine)
        if self._reduction is None:
            average_experts(engine, groups)
            if groups.expert is None and groups.topology.pipeline == 1:
                watch_replicated_weights(engine, groups)
            else:
                take_norm_of_all_ranks(engine, groups)
            self._sum_partial_gradients()
        read_norm_once(engine.optimizer, self._scalars.to_host)
        if engine.optimizer is engine.basic_optimizer:
            replace_fp32_clipping(engine, self._clip_gradients)
            copies = (groups.data_and_sequence, groups.expert_data)
            if all(group is None or group.size() == 1 for group in copies):
                skip_allreduce(engine)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model."""
        self._wait_for_weights()
        return self._engine.module

    def partition_dims(self) -> dict[str, int]:
        """Return the dimension along which each divided parameter's shards lie, by name.

        Communication: one all-gather over the ranks of a replica.
        """
        group = self._groups.model
        parameters = self.module.named_parameters()
        own = {name: shard.dim for name, p in parameters if (shard := shard_of(p))}
        everyones = all_gather_objects(own, group)
        return dict(sorted(pair for dims in everyones for pair in dims.items()))

    @property
    def grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping; None when DeepSpeed took none.

        It is infinite when the gradient has a NaN.
        """
        norm = self._engine.get_global_grad_norm()
        if norm is None:
            return None
        return float(norm) if is_finite(norm) else math.inf

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Loads of the experts in the last step, and what they added to its loss; None without experts."""
        return self._expert_load

    @property
    def num_zeros(self) -> float | None:
        """Zero elements of the last step's gradient; None without --log-num-zeros-in-grad."""
        return self._zeros.count if self._zeros else None

    def counters(self) -> dict[str, tuple[float, ...]]:
        """Collect step counters, learning rate and loss scale by name: equal on all ranks.

        That of the embedding is left out: some stages have none.
        """
        optimizer = self._engine.basic_optimizer
        if optimizer is None:
            return {}
        counting = [*optimizer.state.values(), *optimizer.param_groups]
        steps = {float(each["step"]) for each in counting if "step" in each}
        groups = self._engine.optimizer.param_groups
        rates = {float(group["lr"]) for group in groups if not group.get("embedding")}
        return {
            "steps of the optimizer": tuple(sorted(steps)),
            "steps of DeepSpeed": (self._engine.global_steps, self._engine.skipped_steps),
            "the learning rate": tuple(sorted(rates)),
            "the loss scale": (self.loss_scale,),
        }

    @property
    def has_loss_terms(self) -> bool:
        """Whether the loss has several terms."""
        return bool(self._terms.names)

    def pop_loss_terms(self) -> dict[str, float]:
        """Return the mean of each term of the loss since the last call, by name, on all ranks.

        Communication: every rank must call this, in step.
        """
        return self._terms.take(self._engine.device)

    def params_norm(self) -> float:
        """Return the norm of all weights. Communication: every rank must call this, in step."""
        return params_norm(self.module.parameters(), self._groups)

    def pop_timers(self) -> dict[str, float]:
        """Return the seconds of each timer since the last call, on this rank, and reset them."""
        return self._timers.take()

    def pop_rank_times(self) -> dict[str, float]:
        """Return the seconds by which slow ranks are found, and reset them; see Pace."""
        return self._timers.pace.take() if self._timers.pace else {}

    @property
    def loss_scale(self) -> float:
        """Loss scale of fp16; 1 in other dtypes."""
        return float(getattr(self._engine.optimizer, "cur_scale", 1.0))

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far because the gradient overflowed or was NaN."""
        nonfinite = self._nonfinite.num_skipped if self._nonfinite else 0
        return self._engine.skipped_steps + nonfinite

    def set_lr(self, lr: float) -> None:
        """Set the learning rate from the next step on."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr

    def set_embedding_lr(self, lr: float) -> None:
        """Set the learning rate of the token embedding and the output layer from the next step on."""
        for group in self._engine.optimizer.param_groups:
            if group.get("embedding"):
                group["lr"] = lr

    def set_weight_decay(self, weight_decay: float) -> None:
        """Set the weight decay from the next step on, for the groups that decay."""
        for group in self._engine.optimizer.param_groups:
            group["weight_decay"] = weight_decay * group["wd_mult"]

    def set_global_batch_size(self, samples: int) -> None:
        """Set the global batch size, in samples, from the next step on."""
        if samples != self._engine.train_batch_size():
            self._engine.set_train_batch_size(samples)

    @abstractmethod
    def set_seq_length(self, tokens: int, *, micro_batch_size: int | None = None) -> None:
        """Set the sequence length, in tokens, from the next batch on.

        Args:
            micro_batch_size: samples of a micro-batch; those of training when None.
        """

    @abstractmethod
    def train_batch(self, batches: Iterator[Batch]) -> Tensor:
        """Take one optimizer step on the next global batch; return its mean loss, on all ranks."""

    @abstractmethod
    def evaluate(self, batches: Iterator[Batch], num_micro_batches: int) -> Tensor:
        """Return the mean loss of the next micro-batches of every replica, on all ranks."""

    def save(
        self,
        directory: Path,
        tag: str,
        client_state: dict[str, Any],
        *,
        optimizer: bool = True,
        streams: bool = True,
        write: Write = torch.save,
    ) -> None:
        """Save weights, optimizer and RNG states to `directory`/`tag`.

        Args:
            write: writes each state to its file, perhaps later if it copies the state first.

        Communication: every rank must call this, in step.
        """
        self._wait_for_weights()
        self._files.write = write
        client_state = {**client_state, OPTIMIZER_NAMES: names_of_states(self._engine)}
        without_optimizer = contextlib.nullcontext() if optimizer else self._no_optimizer()
        with without_optimizer, without_expert_files(self._engine):
            self._engine.save_checkpoint(
                str(directory), tag=tag, client_state=client_state, save_latest=False
            )
            save_experts(self._engine, self._groups, directory / tag, write)
        if streams:
            write(stream_states(), self._streams_file(directory / tag))

    def load(
        self,
        directory: Path,
        tag: str,
        *,
        read: Read,
        optimizer: bool = True,
        streams: bool = True,
    ) -> None:
        """Restore what `save` wrote.

        Args:
            read: reads a file.
            optimizer: whether to load its state; otherwise it starts anew.
            streams: whether to load the RNG states; otherwise they stay as they are.

        Raises:
            CheckpointError: a file is missing or does not fit this model.
        """
        optimizer = optimizer and self._engine.optimizer is not None
        # At ZeRO stage 3 the weights come with the optimizer's state; it is forgotten afterwards.
        self._wait_for_weights()
        with_state = optimizer or self._engine.zero_optimization_partition_weights()
        constants = constants_of(self._engine.optimizer)
        self._files.read = read
        try:
            with files_by_name():
                found, _ = self._engine.load_checkpoint(
                    str(directory), tag=tag, load_module_only=not with_state
                )
        except (
            OSError,
            EOFError,
            RuntimeError,
            KeyError,
            AssertionError,
            UnpicklingError,
        ) as error:
            raise CheckpointError(f"{directory / tag} cannot be loaded: {error}") from error
        if found is None:
            raise CheckpointError(f"{directory / tag} holds no DeepSpeed checkpoint")
        if with_state and not optimizer:
            forget_moments(self._engine.basic_optimizer)
        put_constants(self._engine.optimizer, constants, clip=self._engine.gradient_clipping())
        self._wait_for_weights()
        if self._nonfinite:
            self._nonfinite.reset()
        if streams:
            self.load_streams(directory / tag)

    def load_full(
        self,
        checkpoint: FullCheckpoint,
        *,
        optimizer: bool = True,
        buffer_bytes: int = BUFFER_BYTES,
        copies_padding: bool = False,
        new_head: bool = False,
    ) -> None:
        """Restore what a run of another layout saved; see megatron.engine.deepspeed.universal.load_full."""
        optimizer = optimizer and bool(self._engine.optimizer)
        load_full(
            self._engine,
            checkpoint,
            self._groups.model,
            optimizer=optimizer,
            buffer_bytes=buffer_bytes,
            copies_padding=copies_padding,
            new_head=new_head,
        )
        self._wait_for_weights()

    def load_streams(self, folder: Path) -> None:
        """Load the RNG states of this rank.

        Raises:
            CheckpointError: their file is missing or damaged, or another kind of device made it.
        """
        try:
            states = torch.load(self._streams_file(folder), weights_only=True)
        except (OSError, EOFError, RuntimeError, KeyError, UnpicklingError) as error:
            raise CheckpointError(
                f"{folder}: the random streams cannot be read: {error}"
            ) from error
        try:
            restore_streams(states)
        except (RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"{folder}: the random streams do not fit ({error}); --no-load-rng lets them begin "
                "anew, as on another kind of device"
            ) from error

    def renew_streams(self, seed: int, *, sequence_parallel: bool) -> None:
        """Seed every RNG of this rank anew; see start_streams."""
        seed_streams(self._groups, seed=seed, sequence_parallel=sequence_parallel)

    @contextlib.contextmanager
    def _no_optimizer(self) -> Iterator[None]:
        """Leave the optimizer out of the checkpoint that DeepSpeed writes (--no-save-optim)."""
        engine = self._engine
        kept = engine.optimizer, engine.save_zero_checkpoint
        engine.optimizer, engine.save_zero_checkpoint = None, False
        try:
            yield
        finally:
            engine.optimizer, engine.save_zero_checkpoint = kept

    def _count_tokens(self, batches: Iterator[Batch], number: int) -> Iterator[Batch]:
        """Return the `number` batches of a step, with their tokens counted where the loss needs it."""
        return self._counts.read(batches, number) if self._counts else batches

    def _begin_step(self, last_gradients: Sequence[int]) -> None:
        """Prepare for the passes of a step, or of an evaluation.

        Args:
            last_gradients: numbers of the passes that complete gradients, among those that add to them.
        """
        if self._balance:
            self._balance.begin_step(self.loss_scale / self._engine.gradient_accumulation_steps())
        if self._gather:
            self._gather.begin_forward()
        if self._reduction:
            self._reduction.expect(last_gradients)

    def _finish_step(self) -> None:
        """Collect the loads of the experts after a step."""
        if self._balance:
            self._expert_load = self._balance.finish_step(
                self._engine.gradient_accumulation_steps(), self._engine.device
            )

    def _wait_for_weights(self) -> None:
        """Wait for the weights of the last step, which may still be on their way."""
        if self._gather:
            self._gather.wait()

    def _streams_file(self, folder: Path) -> Path:
        return folder / f"rng_rank_{self._groups.rank:05d}.pt"

    def _sum_partial_gradients(self) -> None:
        """Sum gradients of which tensor-parallel ranks have parts: once a step where ranks keep them."""
        engine = self._engine
        parts = [p for p in engine.module.parameters() if p.requires_grad and gradient_group(p)]
        if not parts or engine.optimizer is engine.basic_optimizer:
            return  # where it clips
        if not keeps_reduced_partition(engine.optimizer):
            all_reduce_partial_gradients(parts)
            return

        def sum_and_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            all_reduce_parts(reduced_partition(parts))
            return step(*args, **kwargs)

        wrap_step(engine.optimizer, sum_and_step)

    def _clip_gradients(self) -> float:
        parameters = [*self._engine.module.parameters()]
        all_reduce_parts((p, p.grad) for p in parameters if p.grad is not None)
        return clip_gradients(
            parameters,
            self._groups,
            self._engine.gradient_clipping(),
            to_host=self._scalars.to_host,
        )
