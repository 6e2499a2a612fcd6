"""Flags of Megatron-LM for experts: dispatchers, grouped products and routing."""

from megatron.config.foreign_flags.tables import accepted, refused

_LEAVE = "; leave this flag out"

MIXTURE_FLAGS = (
    *accepted(
        "experts are computed in grouped products, and exchange tokens with uneven all-to-alls: "
        "results are the same",
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
        moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-buffer-size-factor-cpu""",
    ),
    *accepted(
        "layers are recomputed as --recompute-granularity has it: results are the same",
        "moe-layer-recompute",
    ),
    *refused(
        "gate and up rows of an MLP are two blocks" + _LEAVE,
        "moe-shared-expert-glu-interleave-size moe-mlp-glu-interleave-size",
    ),
    *refused(
        "tokens go where the router sends them; --moe-router-load-balancing-type aux_loss evens the "
        "loads" + _LEAVE,
        """moe-enable-routing-replay moe-router-quantile-balancing-ema
        moe-router-force-load-balancing moe-router-force-biased""",
    ),
    *refused(
        "outputs of experts are weighted, not their inputs" + _LEAVE, "moe-apply-probs-on-input"
    ),
    *refused("experts work in the width of --hidden-size" + _LEAVE, "moe-latent-size"),
    *refused(
        "tokens travel to experts and back in the dtype of the network" + _LEAVE,
        "moe-dispatch-fwd-dtype moe-combine-bwd-dtype",
    ),
    *refused(
        "write --moe-expert-capacity-factor instead: the capacity of one expert",
        "moe-expert-rank-capacity-factor",
    ),
    *refused(
        "routes are not written to files; the log has the loads of experts" + _LEAVE,
        """moe-routing-trace-path moe-routing-trace-max-training-iters
        moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states
        moe-routing-trace-dump-weights""",
    ),
    *refused(
        "a network without experts is not made into one with them; write --num-experts for a new run",
        "moe-use-upcycling moe-upcycling-granularity",
    ),
)
