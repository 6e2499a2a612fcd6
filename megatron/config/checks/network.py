"""The network, its objective and its kernels: checks of what they have and take."""

from collections.abc import Iterator

from megatron.common.registry import NETWORKS, OBJECTIVES
from megatron.config.checks.compilation import compile_problems
from megatron.config.checks.pipeline import split_backward_problems
from megatron.config.checks.sequence import ring_problems
from megatron.config.checks.start import Start
from megatron.config.network.kernels import kernels_problems
from megatron.config.network.model_problems import model_problems
from megatron.config.network_contract import decoder_stack_problems
from megatron.config.optimization.curriculum import has_curriculum
from megatron.config.parallelism.layout import parallel_problems
from megatron.config.parallelism.precision import fp8_problems, precision_problems


def network_problems(start: Start) -> Iterator[str]:
    """Yield problems of the network without its optional parts."""
    tensor = max(1, start.config.parallel.tensor_model_parallel_size)
    yield from model_problems(start.config.model, tensor=tensor)


def layout_problems(start: Start) -> Iterator[str]:
    """Yield problems of the parallel layout."""
    yield from parallel_problems(
        start.config.parallel,
        world_size=start.world_size,
        num_layers=start.num_layers,
        depths=start.config.prediction.mtp_num_layers,
        zero_stage=start.zero.given_stage,
    )


def implementation_problems(start: Start) -> Iterator[str]:
    """Yield problems of kernels, compilation and precision."""
    config, device = start.config, start.device
    yield from kernels_problems(config.kernels, config.model, config.precision, device=device)
    yield from compile_problems(start)
    yield from split_backward_problems(start)
    yield from ring_problems(start)
    yield from precision_problems(config.precision, device=device)
    yield from fp8_problems(
        config.precision,
        device=device,
        zero_stage=start.zero.given_stage,
        has_experts=start.has_experts,
    )


def own_flag_problems(start: Start) -> Iterator[str]:
    """Yield flags that an objective's network lacks, and wrong values of the ones it has."""
    config, network = start.config, start.network
    yield from network.problems(config)
    yield from decoder_stack_problems(config, network)
    for name in NETWORKS:
        if name != network.name:
            yield from NETWORKS.get_class(name).misplaced_flags(config)


def loss_problems(start: Start) -> Iterator[str]:
    """Yield why the loss cannot be computed in chunks of tokens, or with one weight for each token."""
    tokens = start.config.kernels.loss_chunk_tokens
    if tokens and OBJECTIVES.is_own(start.objective):
        yield (
            f"--loss-chunk-tokens {tokens}: the loss of a plugin's objective ({start.objective}) gets "
            "all logits at once: leave it out"
        )
    if start.config.masks.calculate_per_token_loss and not start.declaration.weighs_tokens:
        yield (
            f"--calculate-per-token-loss: the loss of {start.objective} is no mean over tokens: leave "
            "the flag out"
        )


def sample_problems(start: Start) -> Iterator[str]:
    """Yield why samples cannot be cut as a plugin or a curriculum does."""
    dataset, declared = start.config.plugins.dataset, start.declaration
    if start.config.data.mock_data:
        if start.objective != "gpt":
            yield f"--mock-data makes samples for pretrain_gpt.py, not of {start.objective}"
        if start.config.fim.fim_rate or dataset:
            yield "--mock-data has no documents: leave --fim-rate and --dataset out"
    if dataset and declared.kind != "documents":
        yield f"--dataset {dataset} reads documents, not {declared.kind}"
    if has_curriculum(start.deepspeed) and not declared.takes_short_samples:
        yield (
            f"{start.config.deepspeed.deepspeed_config}: curriculum_learning cuts the ends of samples "
            "off, which this objective needs: take the block out of the JSON, or train with "
            "pretrain_gpt.py"
        )
