"""Flags of Megatron-LM's checkpoint writers, fault tolerance and restarts."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

CHECKPOINT_FLAGS = (
    *accepted(
        "checkpoints are written by DeepSpeed, each rank its own files, and any layout loads them",
        """use-persistent-ckpt-worker async-strategy async-ckpt-cpu-priority async-ckpt-io-priority
        async-ckpt-use-cpu-shm ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo
        ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-save-process-group
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-replicate-local
        ckpt-fully-parallel-load-replicate-local ckpt-assume-constant-structure
        ckpt-pg-tensors-cache-path ckpt-pg-tensors-cache-create dist-ckpt-save-pre-mcore-014
        dist-ckpt-optim-fully-reshardable distrib-optim-fully-reshardable-mem-efficient
        use-dist-ckpt dist-ckpt-format dist-ckpt-workers ckpt-drop-redundant-extra-state""",
    ),
    *accepted(
        "names, shapes and hashes of a checkpoint are verified whenever it is loaded",
        """dist-ckpt-strictness verify-integrity ~ckpt-load-validate-sharding-integrity
        ~strict-fsdp-dtensor-load""",
    ),
    *accepted("the form of a checkpoint is detected from its files", "auto-detect-ckpt-format"),
    *accepted(
        "each checkpoint records its tokenizer, and a run that loads it is checked against that"
        " record",
        "~save-tokenizer-assets ~use-tokenizer-model-from-checkpoint-args",
    ),
    *accepted(
        "there is one kind of checkpoint: --save-interval sets how often it is written, and "
        "--keep-last how many are kept",
        """non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir
        non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication replication-jump
        replication-factor""",
    ),
    *refused(
        "tensors of single steps are not saved; leave this flag out: checkpoints, written every"
        " --save-interval iterations, have the weights",
        """save-params-interval save-activations-interval save-tokens-per-expert-interval
        save-wgrads-interval save-dgrads-interval""",
    ),
    *refused(
        "a checkpoint loads in any layout: write --tensor-model-parallel-size and "
        "--pipeline-model-parallel-size instead",
        "use-mp-args-from-checkpoint-args",
    ),
    *refused(
        "fp32 weights are saved with the optimizer states: leave out this flag and "
        "--no-load-optim to load both",
        "load-main-params-from-ckpt",
    ),
    *refused(
        "write --ckpt-step with the iteration to load, and --reset-progress to count from 0",
        "override-ckpt-iteration",
    ),
    *refused(
        "convert the checkpoint with tools/convert_checkpoint/from_hf.py, then write --load",
        "load-openai",
    ),
    *refused(
        "a run writes one checkpoint format; leave this flag out, and convert the checkpoint "
        "afterwards with tools/checkpoint/util.py",
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format",
    ),
)

RESTART_FLAGS = (
    *accepted(
        "steps are not rerun; --max-nan-steps and --replica-check-interval end a run with wrong"
        " results",
        "result-rejected-tracker-filename",
    ),
    *refused(
        "write --spike-policy zscore=6 instead, which rolls back to a checkpoint before a loss "
        "spike",
        "check-for-spiky-loss check-for-large-grads",
    ),
    *refused(
        "in-process restart is not built; write --max-restarts N, which restarts a failed run "
        "from its newest checkpoint, and leave this flag out",
        "inprocess-restart",
    ),
    *accepted(
        "it configures --inprocess-restart, which is not built; --hang-timeout ends a hung run",
        """inprocess-max-iterations inprocess-monitor-thread-interval
        inprocess-monitor-process-interval inprocess-progress-watchdog-interval
        inprocess-heartbeat-interval inprocess-soft-timeout inprocess-hard-timeout
        inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout
        inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity
        inprocess-active-world-size inprocess-empty-cuda-cache""",
    ),
    *accepted(
        "no fault-tolerance package is used: launchers get the exit code of a run, and "
        "--hang-timeout ends a hung run",
        "enable-ft-package calc-ft-timeouts ft-num-warmup-iters",
    ),
    *read_as(
        "error-injection-rate",
        "error injection is not built; leave this flag out",
        **{"0": ""},
    ),
    *accepted("error injection is not built", "error-injection-type"),
    *refused(
        "Megatron-LM's fault injector is not built; leave its flags out: --chaos injects faults"
        " here",
        """fault-injector-ranks fault-injector-num-ranks fault-injector-fault-types
        fault-injector-fault-probabilities fault-injector-fault-delay
        fault-injector-delay-start-iteration fault-injector-mtti-seconds
        fault-injector-offset-seconds fault-injector-seed""",
    ),
    *read_as(
        "exit-signal",
        "a run saves and exits on SIGTERM, SIGINT and SIGUSR1: send one of them, and leave this"
        " flag out",
        **dict.fromkeys(("SIGTERM", "SIGINT", "SIGUSR1"), ""),
    ),
    *read_as(
        "exit-signal-handler-for-training", "it takes no value", switch="--exit-signal-handler"
    ),
    *accepted(
        "the training process itself reads samples and handles signals",
        "exit-signal-handler-for-dataloader",
    ),
)
