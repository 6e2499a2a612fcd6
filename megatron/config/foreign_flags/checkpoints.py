"""Flags of Megatron-LM's checkpoint writers, fault tolerance and restarts."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

CHECKPOINT_FLAGS = (
    *accepted(
        "checkpoints are written by DeepSpeed, each rank its own files, and any layout loads them",
        """use-persistent-ckpt-worker async-strategy async-ckpt-cpu-priority async-ckpt-io-priority
        async-ckpt-use-cpu-shm ckpt-fully-parallel-save no-ckpt-fully-parallel-save
        ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo
        ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-save-process-group
        ckpt-fully-parallel-load-process-group ckpt-assume-constant-structure
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
        "a checkpoint records which tokenizer it was trained with, and a run is compared with it",
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
        "single tensors of a step are not written to files; leave this flag out: a checkpoint of "
        "--save-interval has the weights",
        """save-params-interval save-activations-interval save-tokens-per-expert-interval
        save-wgrads-interval save-dgrads-interval""",
    ),
    *refused(
        "a checkpoint loads in any layout: write --tensor-model-parallel-size and "
        "--pipeline-model-parallel-size instead",
        "use-mp-args-from-checkpoint-args",
    ),
    *refused(
        "the fp32 weights of a checkpoint are those of its optimizer: leave this flag and "
        "--no-load-optim out to load both",
        "load-main-params-from-ckpt",
    ),
    *refused(
        "write --ckpt-step with the iteration to load, and --reset-progress to count from 0",
        "override-ckpt-iteration",
    ),
    *refused(
        "a run writes one format; leave this flag out, and convert the checkpoint afterwards: "
        "tools/checkpoint/util.py",
        "ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format",
    ),
)

RESTART_FLAGS = (
    *accepted(
        "a step is taken once; --max-nan-steps and --replica-check-interval end a run that goes wrong",
        "result-rejected-tracker-filename",
    ),
    *refused(
        "write --spike-policy zscore=6 instead, which goes back to a checkpoint before a loss that jumps",
        "check-for-spiky-loss check-for-large-grads",
    ),
    *refused(
        "processes are not restarted inside a job; write --max-restarts N, which starts a run that "
        "failed again from its newest checkpoint, and leave this flag out",
        "inprocess-restart",
    ),
    *accepted(
        "it times --inprocess-restart, which is not here; --hang-timeout ends a run that stands still",
        """inprocess-max-iterations inprocess-monitor-thread-interval
        inprocess-monitor-process-interval inprocess-progress-watchdog-interval
        inprocess-heartbeat-interval inprocess-soft-timeout inprocess-hard-timeout
        inprocess-heartbeat-timeout inprocess-barrier-timeout inprocess-completion-timeout
        inprocess-last-call-wait inprocess-termination-grace-time inprocess-granularity
        inprocess-active-world-size inprocess-empty-cuda-cache""",
    ),
    *accepted(
        "no package for fault tolerance is used: a launcher sees the exit code of a run, and "
        "--hang-timeout ends one that stands still",
        "enable-ft-package calc-ft-timeouts ft-num-warmup-iters",
    ),
    *read_as(
        "error-injection-rate",
        "results are never falsified on purpose; leave this flag out",
        **{"0": ""},
    ),
    *accepted("results are never falsified on purpose", "error-injection-type"),
    *refused(
        "a run does not damage itself on purpose; leave the flags of the fault injector out",
        """fault-injector-ranks fault-injector-num-ranks fault-injector-fault-types
        fault-injector-fault-probabilities fault-injector-fault-delay
        fault-injector-delay-start-iteration fault-injector-mtti-seconds
        fault-injector-offset-seconds fault-injector-seed""",
    ),
    *read_as(
        "exit-signal",
        "a run saves and ends after SIGTERM, SIGINT and SIGUSR1: send one of these, and leave this "
        "flag out",
        **dict.fromkeys(("SIGTERM", "SIGINT", "SIGUSR1"), ""),
    ),
    *read_as(
        "exit-signal-handler-for-training", "it takes no value", switch="--exit-signal-handler"
    ),
    *accepted(
        "samples are read by the training process, which handles signals",
        "exit-signal-handler-for-dataloader",
    ),
)
