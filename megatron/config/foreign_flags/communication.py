"""Flags of Megatron-LM for process groups, sharding, overlap, pipeline stages and offload."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

GROUP_FLAGS = (
    *accepted(
        "process groups, streams and buffers are those of DeepSpeed and PyTorch: results are the same",
        """pipeline-model-parallel-comm-backend nccl-communicator-config-path use-tp-pp-dp-mapping
        disable-gloo-process-groups use-sharp sharp-enabled-group high-priority-stream-groups
        create-all-gather-group use-nccl-ub disable-symmetric-registration
        fsdp-manual-registration use-ring-exchange-p2p fsdp-double-buffer
        fsdp-db-use-persist-buf-on-alloc-fail megatron-fsdp-max-pool-double-buffer
        gtp-expert-remat-nccl-ub gtp-remat-nccl-ub hierarchical-context-parallel-sizes
        fsdp-buffer-count megatron-fsdp-cache-param-bucket-views
        megatron-fsdp-prefetch-recompute-forward-weights disable-grad-buffers-cpu-backup
        disable-param-buffers-cpu-backup""",
    ),
    *accepted(
        "--distributed-timeout-minutes is the timeout of all collectives",
        "distributed-timeout-seconds-after-init",
    ),
    *accepted(
        "PyTorch's flight recorder is configured by environment variables such as "
        "TORCH_FR_BUFFER_SIZE",
        """flight-recorder-dump-path flight-recorder-trace-buffer-size
        ~flight-recorder-dump-on-timeout flight-recorder-include-stack-trace
        ~flight-recorder-include-only-active ~flight-recorder-extra-dump-on-exec""",
    ),
    *accepted("every run saves its flags with its checkpoints", "config-logger-dir"),
    *refused(
        "a run needs real processes; leave this flag out, and check a layout without them with "
        "tools/plan.py",
        "fake-process-group",
    ),
    *refused(
        "all samples have the same length, and each is divided over all context-parallel ranks;"
        " leave this flag out",
        """hybrid-context-parallel max-seqlen-per-dp-cp-rank dynamic-context-parallel
        min-dynamic-context-parallel-size sequence-packing-scheduler pad-packed-seq-alignment
        thd-tail-padding-policy thd-max-packed-sequences pipeline-p2p-fixed-shape""",
    ),
    *accepted(
        "it only changes which tokens of a sequence are on which context-parallel rank: results are"
        " the same",
        "cp-partition-mode attention-cp-layout",
    ),
)

OVERLAP_FLAGS = (
    *accepted(
        "DeepSpeed reduces and gathers in buckets of its own size; --zero-reduce-bucket-size and "
        "--zero-allgather-bucket-size set it",
        """ddp-num-buckets ddp-bucket-size ddp-pad-buckets-for-high-nccl-busbw
        ddp-average-in-collective suggested-communication-unit-size no-gradient-reduce-div-fusion
        ~align-grad-reduce no-align-param-gather overlap-param-gather-with-optimizer-step""",
    ),
    *accepted(
        "it only changes how communication and computation overlap in a pipeline: results are "
        "the same",
        """overlap-p2p-communication no-overlap-p2p-communication
        overlap-p2p-communication-warmup-flush microbatch-group-size-per-virtual-pipeline-stage
        delay-wgrad-compute defer-embedding-wgrad-compute wgrad-deferral-limit""",
    ),
    *accepted(
        "matrix products of tensor-parallel layers are not split to overlap with collectives: "
        "results are the same",
        """tp-comm-overlap tp-comm-overlap-cfg tp-comm-bootstrap-backend ~tp-comm-bulk-wgrad
        ~tp-comm-bulk-dgrad ~tp-comm-overlap-ag ~tp-comm-overlap-rs tp-comm-overlap-rs-dgrad
        ~tp-comm-split-ag ~tp-comm-split-rs""",
    ),
    *refused(
        "write --accumulate-allreduce-grads-in-fp32 instead: gradients are accumulated and "
        "reduced in fp32",
        """ddp-reduce-scatter-with-fp32-accumulation
        ddp-param-name-patterns-for-fp32-local-accumulation""",
    ),
    *read_as("fp32-allreduce", "it takes no value", switch="--accumulate-allreduce-grads-in-fp32"),
    *refused(
        "write communication_data_type in the JSON of --deepspeed_config instead: the dtype in which "
        "gradients are reduced",
        "grad-reduce-in-bf16",
    ),
)

SHARDING_FLAGS = (
    *read_as(
        "data-parallel-sharding-strategy",
        "it is no_shard, optim, optim_grads or optim_grads_params",
        no_shard="",
        optim="--zero-stage 1",
        optim_grads="--zero-stage 2",
        optim_grads_params="--zero-stage 3",
    ),
    *accepted(
        "ZeRO shards instead: --data-parallel-sharding-strategy or --zero-stage selects what is"
        " sharded",
        """use-megatron-fsdp megatron-fsdp-version no-use-layer-wise-param-layout
        megatron-fsdp-enable-fine-grained-param-gather use-layer-wise-param-layout
        expert-data-parallel-sharding-strategy""",
    ),
    *read_as("use-torch-fsdp2", "it takes no value", switch="--zero-stage 3"),
    *accepted(
        "ZeRO shards over all data-parallel ranks: results are the same",
        """num-distributed-optimizer-instances outer-dp-sharding-strategy
        enable-full-sharding-in-hsdp torch-fsdp2-no-reshard-after-forward
        expert-outer-dp-sharding-strategy hfsdp-param-gather-overlap""",
    ),
    *refused(
        "weights are divided over --tensor-model-parallel-size ranks; --zero-stage 3 shards them "
        "further: write that, and leave this flag out",
        """tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
        gtp-remat-opt-in-modules gtp-remat-reduce-scatter-with-fp32-accumulation""",
    ),
    *read_as(
        "megatron-fsdp-main-params-dtype",
        "master weights are fp32; leave this flag out",
        fp32="",
        auto="",
    ),
    *read_as(
        "megatron-fsdp-main-grads-dtype megatron-fsdp-grad-comm-dtype",
        "gradients are accumulated and reduced in fp32, in fp16 runs too if this flag is fp32; "
        "write fp32, or leave this flag out",
        fp32="--accumulate-allreduce-grads-in-fp32",
        auto="",
    ),
)

STAGE_FLAGS = (
    *read_as(
        "standalone-embedding-stage",
        "it takes no value",
        switch="--pp-partition-method 'type:transformer|embedding'",
    ),
)

MEMORY_FLAGS = (
    *refused(
        "write --checkpoint-in-cpu, which offloads the inputs of recomputed layers to host memory",
        """fine-grained-activation-offloading offload-modules cpu-offloading
        cpu-offloading-num-layers cpu-offloading-retain-pinned-cpu-buffers
        min-offloaded-tensor-size delta-offload-bytes-across-pp-ranks activation-offload-fraction
        fine-grained-offloading-max-inflight-offloads""",
    ),
    *read_as(
        "optimizer-offload-fraction",
        "--cpu-optimizer offloads all optimizer states, and "
        "zero_optimization.offload_optimizer.ratio in the JSON of --deepspeed_config a share of"
        " them at ZeRO stage 3: write one of them, and leave this flag out",
        **{"1": "", "1.0": ""},
    ),
    *refused(
        "write --cpu-optimizer instead: optimizer states are kept in host memory, and the step is "
        "made there",
        """chunked-optimizer-state-offload offload-optimizer-states optimizer-state-offload-fraction
        optimizer-state-offload-chunk-size-mb""",
    ),
    *read_as("use-torch-optimizer-for-cpu-offload", "it takes no value", switch="--cpu_torch_adam"),
    *accepted(
        "--use-pin-memory keeps offloaded states in page-locked memory; DeepSpeed copies them",
        "overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params",
    ),
    *accepted(
        "PyTorch's allocator caches memory; the environment variable PYTORCH_CUDA_ALLOC_CONF "
        "configures it",
        "empty-unused-memory-level",
    ),
)
