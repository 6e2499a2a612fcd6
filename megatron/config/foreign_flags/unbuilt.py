"""Flags of networks and methods that are not built: one sentence for each kind."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

_HYBRID_SPECS = (
    "megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec",
    "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
)

NETWORK_FLAGS = (
    *accepted("generation always caches the latents of latent attention", "cache-mla-latents"),
    *refused(
        "attention's output layer is one matrix; leave this flag out",
        "output-projection-groups output-projection-lora-rank",
    ),
    *refused(
        "sparse and indexed attention, and these forms of linear attention, are not built; leave this "
        "flag out",
        """experimental-attention-variant
        dsa-indexer-n-heads dsa-indexer-head-dim dsa-indexer-topk dsa-indexer-topk-freq
        dsa-indexer-skip-topk-offset dsa-indexer-loss-coeff dsa-indexer-use-sparse-loss
        dsa-kernel-backend dsa-indexer-rope-interleaved ~dsa-indexer-rotate-activation
        ~dsa-indexer-scoring-relu dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32
        gdp-num-householder gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute
        linear-attention-type linear-cp-mode linear-cp-layout kda-safe-gate kda-lower-bound
        gdn-pre-gated-delta-rule-fusion gdn-gated-output-norm-fusion gdn-conv-pad-alignment
        dsa-indexer-precision ~dsa-indexer-weights-proj-use-quantization
        dsa-indexer-weights-proj-output-dtype dsa-cp-balance-indexer no-dsa-kernel-fusion
        csa-window-size csa-compress-ratios csa-compress-rotary-base csa-dense-mode""",
    ),
    *refused(
        "this kind of attention is not built; leave this flag out",
        """qk-l2-norm mrope-section mrope-interleaved
        gated-attention-proj-granularity head-wise-attn-gate""",
    ),
    *refused(
        "write --rotary-base instead, and --rotary-local-base for the layers with --window-size",
        "rotary-base-per-layer",
    ),
    *refused(
        "this part of multi-token prediction is not built; leave this flag out",
        """mtp-standalone mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern
        freeze-base-model-for-mtp keep-mtp-in-bf16""",
    ),
    *refused(
        "hyper-connections are not built; leave their flags out",
        """enable-mhc-connections mhc-num-residual-streams mhc-sinkhorn-iterations
        mhc-init-gating-factor mhc-recompute-layer-num enable-hyper-connections
        num-residual-streams mhc-fused-backend use-fused-mhc
        mhc-recompute-attn-cuda-graph-split""",
    ),
    *refused(
        "the residual stream has --hidden-size features; leave the flags of wide residuals out",
        """wide-residual wide-residual-streamwise-sigmoid-init-scale wide-residual-learned-retention
        wide-residual-retention-init wide-residual-retention-max-forget""",
    ),
    *refused(
        "memory tables of n-grams (Engram) are not built; leave their flags out",
        """engram-hash-table-min-sizes engram-max-ngram-size engram-embedding-dim-per-ngram
        engram-num-hash-heads-per-ngram engram-layer-ids engram-target-layer-indices engram-seed
        engram-kernel-size engram-table-backend""",
    ),
    # Without a pattern beside it, --network hybrid is refused with what to write.
    *read_as("is-hybrid-model", "it takes no value", switch="--network hybrid"),
    *read_as(
        "hybrid-attention-ratio hybrid-mlp-ratio linear-attention-freq",
        "write --hybrid-layer-pattern with a letter for each layer instead",
        other="--network hybrid",
    ),
    *accepted("recurrences are computed in chunks by PyTorch", "disable-mamba-mem-eff-path"),
    *read_as(
        "mamba-training-ssm-states-dtype",
        "states of recurrences are fp32; leave this flag out",
        fp32="",
    ),
    *refused(
        "this option of hybrid networks is not built; leave this flag out",
        "mlp-chunks-for-training",
    ),
    *refused(
        "layers of different sizes are not built; leave this flag out",
        "heterogeneous-layers-config-path heterogeneous-layers-config-encoded-json",
    ),
    *refused(
        "each layer has weights of its own; leave this flag out",
        "num-unique-layers param-sharing-style",
    ),
    *refused(
        "this activation is not built; write --activation with one that --help-all lists, and "
        "leave this flag out",
        """activation-func-tanh-clamp-scale activation-func-tanh-clamp-scale-linear situ-glu
        moe-use-situ-glu situ-glu-beta1 situ-glu-beta2""",
    ),
    *refused(
        "write --rope-original-max-position-embeddings, and --rotary-scaling-factor",
        "original-max-position-embeddings",
    ),
    *accepted(
        "bounds are rounded unless --no-rope-truncation is given",
        "yarn-correction-range-round-to-int",
    ),
    *refused(
        "maximal update parametrization is not built; choose --lr and --init-method-std yourself, "
        "and leave this flag out",
        """mup mup-input-mult mup-output-mult mup-attn-mult use-mup mup-width-mult
        mup-base-hidden-size mup-embedding-mult mup-base-head-dim mup-attn-scale-power""",
    ),
    *refused(
        "embeddings are initialized with --init-method-std, like all weights; leave this flag out",
        "embedding-init-method-std",
    ),
    *accepted(
        "weights are always initialized, before --load replaces them",
        "no-initialization init-model-with-meta-device",
    ),
    *read_as(
        "spec",
        "write --network NAME with --plugin MODULE for a network of your own",
        local="",
        **dict.fromkeys(_HYBRID_SPECS, "--network hybrid"),
    ),
)

METHOD_FLAGS = (
    *refused(
        "reinforcement learning is not built; leave its flags out, or train on conversations: "
        "finetune_sft.py",
        """perform-rl-step rl-prompts-per-eval grpo-prompts-per-step grpo-group-size rl-generation-lag
        rl-max-inflight-requests rl-submission-granularity rl-consumption-granularity
        rl-durable-rollout-bank rl-rollout-bank-dir rl-rollout-bank-max-bytes grpo-iterations
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-kl-beta grpo-entropy-term-weight
        grpo-filter-groups-with-same-reward langrl-env-config rl-default-temperature
        rl-default-top-p rl-default-top-k rl-offload-optimizer-during-inference
        rl-kv-cache-management-mode rl-persist-cuda-graphs rl-partial-rollouts
        rl-inference-logprobs-is-correction rl-importance-sampling-truncation-coef
        rl-use-sequence-packing rl-sequence-packing-max-sequences-per-bin rl-sequence-packing-algo
        rl-training-cuda-graphs rl-inference-tensor-model-parallel-size
        rl-inference-pipeline-model-parallel-size rl-inference-expert-model-parallel-size
        rl-inference-expert-tensor-model-parallel-size rl-inference-model-unified-memory-level
        rl-offload-inference-model-weights-when-idle refit-method rl-verify-model-weights-swap
        rl-skip-bos-token rl-profile rl-profile-dir rl-inference-parsers
        rl-offload-inference-model-weights refit-execution-batch-bytes""",
    ),
    *accepted(
        "what it turns off is not built",
        """no-rl-partial-rollouts no-rl-inference-logprobs-is-correction no-rl-use-sequence-packing
        no-rl-training-cuda-graphs no-rl-persist-cuda-graphs no-rl-verify-model-weights-swap
        no-rl-skip-bos-token no-rl-offload-inference-model-weights
        no-rl-offload-inference-model-weights-when-idle""",
    ),
    *refused(
        "knowledge distillation is not built; leave its flags out",
        """kd mos kd-alpha-ce kd-beta-ce kd-temp num-layers-teacher num-experts-teacher
        hidden-size-teacher num-attention-heads-teacher load-teacher logits-save-top-k
        logits-save-top-p logits-save-top-p-min-k logits-save-dir logits-save-dtype
        logits-load-dir logits-load-decode-threads logits-load-prefetch-factor
        logits-load-msc-prefetch-depth logits-load-kd-loss-alpha logits-load-ignore-errors""",
    ),
    *refused(
        "vision models are not built; leave their flags out",
        """num-classes img-dim num-channels patch-dim img-h img-w classes-fraction
        data-per-class-fraction no-data-sharding head-lr-mult vision-pretraining
        vision-pretraining-type vision-backbone-type swin-backbone-type mask-type mask-factor
        iter-per-epoch dino-local-img-size dino-local-crops-number dino-head-hidden-size
        dino-bottleneck-size dino-freeze-last-layer dino-norm-last-layer dino-warmup-teacher-temp
        dino-teacher-temp dino-warmup-teacher-temp-epochs""",
    ),
)
