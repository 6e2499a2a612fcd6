"""torch.compile: checks of what it cannot compile."""

from collections.abc import Iterator

from megatron.config.checks.start import Start
from megatron.config.network.kernels import attention_of
from megatron.config.optimization.curriculum import has_curriculum


def compile_problems(start: Start) -> Iterator[str]:
    """Yield every reason why torch.compile cannot compile the transformer layers of this run."""
    kernels, recompute = start.config.kernels, start.config.recompute
    mode = kernels.compile_mode
    if not kernels.compile:
        if mode:
            yield f"--compile-mode {mode} is of --compile: add that flag, or leave this one out"
        return
    if kernels.kernels in ("triton", "apex"):
        yield (
            f"--compile compiles PyTorch's operations, not those of --kernels {kernels.kernels}: "
            "leave one of the two out"
        )
    if (attention := attention_of(kernels, start.config.model)) in ("flash", "flex"):
        yield f"--compile has no {attention} attention: leave it out, or take --attention-impl sdpa"
    if recompute.recompute_activations or recompute.recompute_granularity == "selective":
        yield (
            "--compile decides itself what of attention is kept: leave it or selective "
            "recomputation out, or take --recompute-granularity full"
        )
    if start.zero.given_stage == 3:
        yield "--compile needs full weights in each layer: leave it out, or take --zero-stage 2"
    if start.has_experts:
        yield "--compile does not compile experts: leave it or --num-experts out"
    if has_curriculum(start.deepspeed):
        yield "--compile compiles one length of samples: leave it or curriculum_learning out"
    dropout = {
        "--attention-dropout": start.config.model.attention_dropout,
        "--lora-dropout": start.config.lora.lora_dropout,
    }
    if start.config.parallel.tensor_model_parallel_size > 1:
        for flag, share in dropout.items():
            if share:
                yield (
                    f"--compile has one RNG state, and {flag} {share} needs one for each tensor-"
                    f"parallel rank: write {flag} 0, or leave --compile out"
                )
    if mode == "reduce-overhead":
        yield from _cuda_graph_problems(start)


def _cuda_graph_problems(start: Start) -> Iterator[str]:
    """Yield why CUDA graphs cannot be used: they reuse the memory of a finished micro-batch."""
    recompute = start.config.recompute
    flag, others = "--compile-mode reduce-overhead", "take another mode"
    if start.device == "cpu":
        yield f"{flag} needs a GPU and this run is on CPUs: {others}"
    if start.config.parallel.pipeline_model_parallel_size > 1:
        yield f"{flag} has one micro-batch at a time, pipeline stages have several: {others}"
    if recompute.checkpoint_activations or recompute.recompute_granularity == "full":
        yield f"{flag} and full recomputation exclude each other: {others}"
