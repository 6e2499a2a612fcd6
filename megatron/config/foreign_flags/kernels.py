"""Flags of Megatron-LM for kernels, CUDA graphs, low precision and the computation of experts."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

_32_BITS = (
    "optimizer states are fp32, or 8-bit with --optimizer adam8bit; leave this flag out, or"
    " write fp32"
)

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
        "--kernels and --attention-impl select fused kernels; results are the same",
        """cross-entropy-loss-fusion cross-entropy-fusion-impl use-transformer-engine-op-fuser
        use-te-activation-func no-bias-swiglu-fusion fused-residual-rmsnorm
        use-fused-weighted-squared-relu flash-attention-version use-kitchen-attention
        kitchen-attention-backend mla-down-proj-fusion ~clone-scatter-output-in-embedding
        disable-mem-efficient-ln fallback-to-eager-attn scaled-masked-softmax-fusion
        no-scaled-masked-softmax-fusion scaled-upper-triang-masked-softmax-fusion""",
    ),
    *accepted("there is one implementation of random number generators", "te-rng-tracker"),
    *accepted(
        "parameter names in checkpoints do not depend on the kernels", "export-te-mcore-model"
    ),
    *accepted("no feature needs this switch", "enable-experimental"),
    *accepted("nothing is compiled unless --compile is given", "disable-jit-fuser"),
    *accepted(
        "training captures no CUDA graphs: results are the same; --compile fuses kernels instead",
        """enable-cuda-graph cuda-graph-warmup-steps external-cuda-graph cuda-graph-impl
        cuda-graph-scope cuda-graph-modules optimizer-cuda-graph delay-offload-until-cuda-graph
        cuda-graph-dynamic-microbatches""",
    ),
    *read_as("ds_fused_adam", "it takes no value", switch="--optimizer-impl deepspeed"),
)

PRECISION_FLAGS = (
    *accepted(
        "weights are stored in 16 and 32 bits, and cast to fp8 for matrix products",
        "fp8-param-gather keep-fp8-transpose-cache reuse-grad-buf-for-mxfp8-param-ag",
    ),
    *refused(
        "--fp8-format applies to all matrix products of the layers, forward and backward; leave"
        " this flag out",
        """fp8-quantizer-factory te-precision-config-file kitchen-config-file
        kitchen-recipe-number""",
    ),
    *refused(
        "no layer or product can be kept out of fp8: leave out this flag or --fp8-format",
        """~fp8-wgrad fp8-output-proj first-last-layers-bf16 num-layers-at-start-in-bf16
        num-layers-at-end-in-bf16""",
        only_with="--fp8-format",
    ),
    *refused(
        "FP4 matrix products are not built; write --fp8-format hybrid, or leave this flag out",
        "fp4-format fp4-recipe fp4-quantizer-factory fp4-param-gather",
    ),
    *accepted(
        "optimizer states are fp32 unless a flag sets another dtype",
        "use-precision-aware-optimizer",
    ),
    *read_as("main-params-dtype exp-avg-dtype exp-avg-sq-dtype", _32_BITS, fp32=""),
    *read_as(
        "main-grads-dtype",
        "gradients are accumulated in fp32, in fp16 runs too if this flag is fp32; write fp32, "
        "or leave this flag out",
        fp32="--accumulate-allreduce-grads-in-fp32",
    ),
    *read_as(
        "output-logit-dtype",
        "the loss is always computed in fp32; leave this flag out",
        fp32="",
    ),
    *refused(
        "bf16 matrix products use PyTorch's default accumulation; leave this flag out",
        "disable-bf16-reduced-precision-matmul",
    ),
)

_LEAVE = "; leave this flag out"

MIXTURE_FLAGS = (
    *accepted(
        "experts use grouped matrix products, and tokens are exchanged with all-to-alls of "
        "uneven sizes: results are the same",
        """overlap-moe-expert-parallel-comm overlap-dispatch-backward-with-experts-wgrad
        ep-overlap-early-attn-memory-release high-priority-a2a-comm-stream
        use-grouped-gemm-for-shared-expert use-grouped-gemm-for-dense-mlp moe-use-grouped-tensor
        moe-single-grouped-weight moe-single-grouped-bias moe-enable-deepep
        moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms moe-deepep-num-sms
        moe-permute-fusion-into-hybridep moe-hybridep-pad-uneven-dispatch-inputs
        moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing moe-hybridep-num-blocks-permute
        moe-hybridep-num-blocks-unpermute moe-ncclep-zero-copy moe-router-fusion
        moe-router-padding-for-quantization moe-router-padding-for-fp8
        moe-pad-experts-for-cuda-graph-inference moe-paged-stash moe-paged-stash-page-size
        moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu
        moe-megakernel-backend moe-megakernel-backend-config dense-grouped-gemm
        moe-hybridep-pad-variable-tokens moe-hybridep-routing-map-mode moe-ncclep-static-shape
        moe-ncclep-use-symm-mem ~moe-router-aux-loss-fusion
        ep-overlap-use-scheduled-tensor-release""",
    ),
    *accepted(
        "--recompute-granularity selects what is recomputed: results are the same",
        "moe-layer-recompute",
    ),
    *refused(
        "the gate and up projections of an MLP are two contiguous blocks" + _LEAVE,
        "moe-shared-expert-glu-interleave-size moe-mlp-glu-interleave-size",
    ),
    *refused(
        "the router alone chooses experts; --moe-router-load-balancing-type aux_loss balances "
        "the loads" + _LEAVE,
        """moe-enable-routing-replay moe-router-quantile-balancing-ema
        moe-router-force-load-balancing moe-router-force-biased
        moe-router-quantile-balancing-estimation-scope moe-router-qb-num-bins""",
    ),
    *refused(
        "router weights multiply the outputs of experts, not their inputs" + _LEAVE,
        "moe-apply-probs-on-input",
    ),
    *refused(
        "inputs and outputs of experts have --hidden-size features" + _LEAVE,
        "moe-latent-size moe-latent-up-projection-rmsnorm moe-use-norm-before-up-proj",
    ),
    *refused(
        "experts and router read the output of their own layer's attention" + _LEAVE,
        "moe-shortcut-connection moe-shortcut-post-norm moe-shortcut-parallel",
    ),
    *read_as(
        "moe-num-hash-layers moe-n-hash-layers",
        "the router of every layer with experts is learned" + _LEAVE,
        **{"0": ""},
    ),
    *refused(
        "tokens are exchanged in the dtype of the network" + _LEAVE,
        "moe-dispatch-fwd-dtype moe-combine-bwd-dtype",
    ),
    *refused(
        "write --moe-expert-capacity-factor instead: the capacity of one expert",
        "moe-expert-rank-capacity-factor",
    ),
    *refused(
        "routing traces are not written; the log has the loads of experts" + _LEAVE,
        """moe-routing-trace-path moe-routing-trace-max-training-iters
        moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states
        moe-routing-trace-dump-weights""",
    ),
    *refused(
        "run tools/checkpoint/upcycle.py --load DENSE --save EXPERTS with the flags of the experts, "
        "then train with --load EXPERTS --finetune instead",
        "moe-use-upcycling moe-upcycling-granularity",
    ),
)
