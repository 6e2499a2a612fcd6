"""Flags of Megatron-LM for logs, telemetry, profiling and its inference engine."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

_PROFILES = "--profile is PyTorch's profiler; --profile-dir names the directory of its traces"

REPORT_FLAGS = (
    *read_as(
        "logging-level",
        "it is a number of Python's logging: 10, 20, 30, 40 or 50",
        **{
            "10": "--log-level debug",
            "20": "--log-level info",
            # Progress is logged here, and printed there whatever the level is.
            **dict.fromkeys(("0", "30", "40", "50"), ""),
        },
    ),
    *read_as(
        "disable-log-loss-scale-to-tensorboard",
        "it takes no value",
        switch="--no-log-loss-scale-to-tensorboard",
    ),
    *accepted(
        "--slow-rank-factor logs ranks that take longer than others by that factor",
        "straggler-ctrlr-port straggler-minmax-count disable-straggler-on-startup",
    ),
    *accepted(
        "there is no such service; --tensorboard-dir and --wandb-project write the curves of a run",
        """run-workload-inspector-server no-one-logger one-logger-project one-logger-run-name
        one-logger-async app-tag-run-name app-tag-run-version otel-enabled otel-service-name
        otel-span-groups""",
    ),
    *accepted("the journal of a run has a record of every step", "log-progress"),
    *accepted(
        "used memory is written with each log line of every run",
        "log-memory-interval log-device-memory-used",
    ),
    *accepted(
        "it is not logged; --log-params-norm and --log-num-zeros-in-grad log statistics of "
        "weights and gradients",
        "log-max-attention-logit dump-param-to-param-group-map",
    ),
    *accepted(
        "layers are not measured one by one; --profile records the time of each operation",
        "log-per-layer-resource-usage log-per-layer-resource-usage-interval",
    ),
    *accepted("--codecarbon-dir DIR logs the energy use of a run", "log-energy"),
    *accepted("timers do not wait for other ranks", "no-barrier-with-level-1-timing"),
    *accepted(
        _PROFILES,
        """use-pytorch-profiler pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack
        pytorch-profiler-collect-chakra record-shapes record-memory-history memory-snapshot-path""",
    ),
    *refused(
        "write --profile --profile-step-start and --profile-step-end instead", "profile_steps"
    ),
    *accepted(
        "--replica-check-interval and --hang-timeout check a run",
        "gpu-sniff-test-interval train-sync-interval test-mode",
    ),
    *accepted("Python's automatic garbage collection is used", "~manual-gc-eval"),
    *accepted("URLs are read with fsspec, without this client", "enable-msc disable-msc"),
)

INFERENCE_FLAGS = (
    *refused(
        "batch-invariant kernels are not built; leave this flag out: a run is reproducible bit "
        "for bit with the same command and layout",
        "batch-invariant-mode batch-invariant-backend batch-invariant-collective",
    ),
    *accepted(
        "it configures Megatron-LM's inference engine, which training does not use; for "
        "generation see the flags of tools/run_text_generation_server.py",
        """inference-batch-times-seqlen-threshold max-tokens-to-oom use-legacy-static-engine
        inference-max-requests inference-max-seq-length inference-dynamic-batching
        inference-dynamic-batching-buffer-size-gb
        inference-dynamic-batching-paused-buffer-size-gb
        inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-block-size
        inference-dynamic-batching-max-requests inference-dynamic-batching-max-tokens
        inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-track-generated-token-events decode-only-cuda-graphs
        inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens
        inference-dynamic-batching-unified-memory-level enable-chunked-prefill
        num-speculative-tokens inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-eviction-policy
        inference-dynamic-batching-prefix-caching-coordinator-policy
        inference-dynamic-batching-prefix-caching-routing-alpha
        inference-dynamic-batching-prefix-caching-mamba-gb
        inference-dynamic-batching-cuda-graph-mixed-prefill-count
        inference-dynamic-batching-cuda-graph-sizing-distribution
        inference-dynamic-batching-sampling-backend use-same-sampling-seed-across-dp-ranks
        inference-dynamic-batching-async-sched-mode inference-dynamic-batching-logprobs-mode
        inference-logging-step-interval inference-text-gen-server-logging inference-wandb-logging
        inference-coordinator-port mamba-inference-conv-states-dtype
        mamba-inference-ssm-states-dtype inference-use-synchronous-zmq-collectives
        inference-disable-ep-consensus inference-shards inference-cuda-graph-scope flash-decode
        symmetric-ar-type
        nccl-all-reduce-for-prefill inference-fuse-tp-communication
        inference-disable-triton-nvls-kernels inference-grouped-gemm-backend
        inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type
        mlp-chunks-for-prefill inference-rng-tracker inference-kv-cache-management-mode
        inference-static-kv-memory-pointers no-inference-static-kv-memory-pointers
        no-inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-cache-ttl-seconds
        inference-dynamic-batching-media-cache-coordinator-policy
        inference-dynamic-batching-media-cache-routing-weight
        inference-dynamic-batching-vision-embedding-cache-max-bytes
        inference-dynamic-batching-allow-stale-multimodal-embeddings
        no-inference-text-gen-server-logging no-inference-wandb-logging
        no-inference-use-synchronous-zmq-collectives no-inference-disable-ep-consensus
        inference-flashinfer-mxfp8-token-capacity""",
    ),
)
