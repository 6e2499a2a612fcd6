"""Notices: what a user should know of a run that starts."""

from collections.abc import Iterator

from megatron.config.checks.start import Start
from megatron.config.config import Config
from megatron.config.data.objective import ObjectivePlan
from megatron.config.data.tokenizer import vocab_notices
from megatron.config.network.kernels import plan_kernels
from megatron.config.objectives import objective_notices
from megatron.config.parallelism.deepspeed_keys import key_notices
from megatron.config.parallelism.layout import parallel_notices, uses_ring
from megatron.config.parallelism.precision import precision_notices
from megatron.config.parallelism.recompute import plan_recompute, recompute_notices
from megatron.config.parallelism.zero import zero_notices
from megatron.config.run.checkpoint import checkpoint_notices


def plan_notices(start: Start, padded_vocab_size: int, objective: ObjectivePlan) -> Iterator[str]:
    """Yield what a user should know of how a valid config is read."""
    config = start.config
    yield from parallel_notices(config.parallel, seq_length=config.model.seq_length)
    yield from _other_effect_notices(config)
    if not start.declaration.has_epochs:
        yield from checkpoint_notices(config.checkpoint)
    if config.data.mock_data and config.data.split:
        yield "--split has no effect with --mock-data: each set has random tokens of its own"
    yield from precision_notices(config.precision, start.deepspeed)
    yield from zero_notices(start.zero, config.optimizer)
    yield from recompute_notices(
        plan_recompute(config.recompute, num_layers=1, pipeline=1),
        attention=plan_kernels(config.kernels, config.model, config.precision).attention,
        device=start.device,
        ring=uses_ring(config.parallel),
    )
    yield from key_notices(start.deepspeed)
    if "optimizer" in start.deepspeed:
        yield "the optimizer block of the DeepSpeed JSON is not used: --optimizer and its flags decide"
    yield from vocab_notices(config.tokenizer, padded=padded_vocab_size)
    yield from objective_notices(objective)


def _other_effect_notices(config: Config) -> Iterator[str]:
    """Yield a notice for every flag that has no effect beside others, or another than its number."""
    meant = config.experts.expert_tensor_parallel_size
    tensor, size = config.parallel.tensor_model_parallel_size, config.expert_parallel_size
    if meant not in (None, tensor):
        yield (
            f"--expert-tensor-parallel-size {meant}: experts are divided over all {tensor} tensor-"
            f"parallel ranks; --moe-expert-parallel-size {config.experts.moe_expert_parallel_size} is "
            f"read as {size}"
        )
    if config.schedule.decoupled_lr and config.lora.lora_rank:
        yield "--decoupled-lr has no effect with --lora-rank: no embedding is trained"
    if config.optimizer.apply_wd_to_qk_layernorm and not config.model.qk_layernorm:
        yield "--apply-wd-to-qk-layernorm has no effect without --qk-layernorm"
