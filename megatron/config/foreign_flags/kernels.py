"""Flags of Megatron-LM for fused kernels, Transformer Engine, CUDA graphs and low precision."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

_32_BITS = "the optimizer keeps 32 bits, or 8 with --optimizer adam8bit; leave this flag out, or write fp32"

KERNEL_FLAGS = (
    *read_as(
        "attention-backend",
        "it is flash, fused, unfused, local or auto",
        flash="--attention-impl flash",
        fused="--attention-impl sdpa",
        unfused="--attention-impl fused-softmax",
        local="--attention-impl reference",
        auto="",
    ),
    *accepted(
        "kernels that fuse operations are chosen by --kernels and --attention-impl; they compute the "
        "same",
        """cross-entropy-loss-fusion cross-entropy-fusion-impl use-transformer-engine-op-fuser
        use-te-activation-func no-bias-swiglu-fusion fused-residual-rmsnorm
        use-fused-weighted-squared-relu flash-attention-version use-kitchen-attention
        kitchen-attention-backend mla-down-proj-fusion ~clone-scatter-output-in-embedding
        disable-mem-efficient-ln""",
    ),
    *accepted("there is one way to draw random numbers, on every device", "te-rng-tracker"),
    *accepted("a checkpoint has one form of names, for every kernel", "export-te-mcore-model"),
    *accepted("no feature needs this switch", "enable-experimental"),
    *accepted("nothing is compiled unless --compile is given", "disable-jit-fuser"),
    *accepted(
        "training captures no CUDA graphs: results are the same; --compile fuses kernels instead",
        """enable-cuda-graph cuda-graph-warmup-steps external-cuda-graph cuda-graph-impl
        cuda-graph-scope cuda-graph-modules optimizer-cuda-graph delay-offload-until-cuda-graph""",
    ),
    *read_as("ds_fused_adam", "it takes no value", switch="--optimizer-impl deepspeed"),
)

PRECISION_FLAGS = (
    *accepted(
        "weights are kept in 16 and 32 bits, and cast to fp8 where they are multiplied",
        "fp8-param-gather keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag",
    ),
    *refused(
        "--fp8-format holds for all products of the layers, forward and backward; leave this flag "
        "out",
        """fp8-quantizer-factory ~fp8-wgrad fp8-output-proj first-last-layers-bf16
        num-layers-at-start-in-bf16 num-layers-at-end-in-bf16 te-precision-config-file
        kitchen-config-file kitchen-recipe-number""",
    ),
    *refused(
        "products in 4 bits are not built; write --fp8-format hybrid, or leave this flag out",
        "fp4-format fp4-recipe fp4-quantizer-factory fp4-param-gather",
    ),
    *accepted(
        "the optimizer keeps 32 bits unless a flag of its states says otherwise",
        "use-precision-aware-optimizer",
    ),
    *read_as(
        "main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype", _32_BITS, fp32=""
    ),
    *read_as(
        "output-logit-dtype",
        "the loss is computed in 32 bits in every run; leave this flag out",
        fp32="",
    ),
    *refused(
        "products in bf16 add up as PyTorch's default has it; leave this flag out",
        "disable-bf16-reduced-precision-matmul",
    ),
)
