"""Names of other trainers: Hugging Face's Trainer and TRL, nanoGPT, litgpt, torchtitan, GPT-NeoX.

Each has the sentence that says what to write here. They are looked up for unknown flags and keys only,
so that a plugin may have a flag of that name.
"""

from collections.abc import Mapping

_TWINS: Mapping[str, str] = {
    "--adam-beta1": "beta1",
    "--adam-beta2": "beta2",
    "--adam-eps": "adam-epsilon optimizer.eps",
    "--async-save": "checkpoint.async-mode",
    "--attention-dropout": "attn-dropout attn-pdrop",
    "--attention-impl": "attn-implementation attention-config",
    "--clip-grad": "max-grad-norm grad-clip gradient-clipping max-norm gradient-clip-val",
    "--compile": "torch-compile torch-compile-backend compile.enable",
    "--context-parallel-size": "context-parallel-degree cp-size",
    "--data-path": "train-data-paths data-paths",
    "--device": "accelerator",
    "--eval-interval": "eval-steps eval.interval validation.freq val-check-interval eval-freq",
    "--eval-iters": "eval.max-iters validation.steps limit-val-batches eval-batches",
    "--eval-micro-batch-size": "per-device-eval-batch-size per-gpu-eval-batch-size",
    "--expert-model-parallel-size": "expert-parallel-degree ep-size",
    "--gradient-accumulation-steps": "gradient-accumulation-iters",
    "--hidden-size": "n-embd n-embed d-model embed-dim",
    "--keep-last": "save-total-limit keep-latest-k keep-last-n-checkpoints",
    "--log-interval": "logging-steps log-freq log-every-n-steps log-every",
    "--lora-rank": "lora-r",
    "--lora-target-modules": "target-modules",
    "--lr": "learning-rate",
    "--lr-decay-style": "lr-scheduler-type lr-scheduler decay-type",
    "--lr-warmup-fraction": "warmup-ratio",
    "--lr-warmup-iters": "warmup-steps warmup-iters lr-warmup-steps num-warmup-steps",
    "--max-position-embeddings": "n-positions n-ctx",
    "--micro-batch-size": (
        "per-device-train-batch-size train-micro-batch-size-per-gpu per-gpu-train-batch-size "
        "local-batch-size device-batch-size"
    ),
    "--normalization": "norm norm-type",
    "--num-attention-heads": "n-head n-heads num-heads",
    "--num-layers": "n-layer n-layers num-hidden-layers",
    "--num-query-groups": "n-kv-heads n-query-groups num-kv-heads",
    "--optimizer": "optim optimizer-type optimizer.name optimizer.type",
    "--pipeline-model-parallel-size": ("pipeline-parallel-degree pipeline-parallel-size pp-size"),
    "--position-embedding-type": "pos-emb",
    "--preset": "model-name model.name model.flavor model",
    "--profile": "enable-profiling profiling.enable",
    "--rotary-percent": "rotary-pct rotary-percentage",
    "--save": "output-dir out-dir save-dir checkpoint.folder save-folder dump-folder checkpoint-dir",
    "--save-interval": "save-steps checkpoint.interval checkpoint-factor checkpoint-interval",
    "--seq-length": "block-size seq-len max-length max-seq-len context-length sequence-length",
    "--tensor-model-parallel-size": ("tensor-parallel-degree tensor-parallel-size tp-size"),
    "--tensorboard-dir": "logging-dir save-tb-folder enable-tensorboard",
    "--tokenizer-name-or-path": "tokenizer-dir tokenizer-path hf-assets-path tokenizer-name",
    "--train-iters": "max-steps max-iters steps max-train-steps num-train-steps training.steps",
    "--train-tokens": "max-tokens train.max-tokens",
    "--untie-embeddings-and-output-weights": "no-weight-tying",
    "--wandb-exp-name": "run-name wandb-run-name wandb-group",
}
"""By flag, other names of the same thing."""

_GLOBAL = "write --global-batch-size: the samples of a step over all devices"
_PRECISION = "write --bf16 or --fp16, or neither of them for fp32"
_DROPOUT = "write --hidden-dropout and --attention-dropout"
_LOAD = "write --load DIR with the same DIR as --save: a run resumes from its newest checkpoint"
_WEIGHTS = "write --finetune --load DIR; tools/convert_checkpoint/from_hf.py makes DIR of a model of Hugging Face"
_SHARDING = "write --zero-stage: 1 shards optimizer states, 2 also gradients, 3 also parameters"
_LAUNCHER = "the launcher sets the number of processes, as deepspeed --num_gpus N or torchrun does"
_EVALUATES = "evaluation runs every --eval-interval iterations; --eval-iters 0 turns it off"
_SAVES = "write --save DIR and --save-interval"
_REPORTS = "write --tensorboard-dir, or --wandb-project and --wandb-exp-name"
_JSON = "write --deepspeed_config FILE for DeepSpeed's JSON"
_EPOCHS = "write --train-samples: the samples of an epoch, times the epochs"
_WANDB = "write --wandb-project and --wandb-exp-name"
_CHAT = "tools/preprocess_data.py --conversations makes token files for finetune_sft.py"
_TEXT = "tools/preprocess_data.py makes token files of text, and --data-path names them"

_ANSWERS: Mapping[str, str] = {
    "deepspeed VALUE": "write --deepspeed_config FILE",
    "config-file": "write --config FILE: YAML with the flags of this program",
    "deepspeed-config-file": "write --deepspeed_config FILE",
    "zero-optimization": _JSON,
    "always-save-checkpoint": _SAVES,
    "save-strategy": _SAVES,
    "checkpoint.enable": _SAVES,
    "enable-checkpoint": _SAVES,
    "do-train": "a run trains unless --eval-only is given",
    "do-eval": _EVALUATES,
    "no-eval": _EVALUATES,
    "evaluation-strategy": _EVALUATES,
    "eval-strategy": _EVALUATES,
    **dict.fromkeys(("num-train-epochs", "max-epochs", "num-epochs", "train.epochs"), _EPOCHS),
    "train-batch-size": _GLOBAL,
    "total-batch-size": _GLOBAL,
    "gradient-checkpointing": "write --recompute-granularity full",
    "activation-checkpoint.mode": "write --recompute-granularity full or selective",
    "precision": _PRECISION,
    "dtype": _PRECISION,
    "torch-dtype": _PRECISION,
    "mixed-precision": _PRECISION,
    "mixed-precision-param": _PRECISION,
    "tf32": "fp32 matrix products do not use TF32; write --bf16 for speed",
    "dropout": _DROPOUT,
    "resume": _LOAD,
    "resume-from-checkpoint": _LOAD,
    "model-name-or-path": _WEIGHTS,
    "checkpoint-name": _WEIGHTS,
    "initial-checkpoint-dir": _WEIGHTS,
    "initial-load-path": _WEIGHTS,
    "init-from": "write --load DIR to resume, or --finetune --load DIR to take its weights alone",
    "fsdp": _SHARDING,
    "fsdp-config": _SHARDING,
    "data-parallel-shard-degree": _SHARDING,
    "data-parallel-replicate-degree": "all processes that tensor and pipeline sizes leave are replicas",
    "devices": _LAUNCHER,
    "gpus": _LAUNCHER,
    "n-gpus": _LAUNCHER,
    "num-devices": _LAUNCHER,
    "num-nodes": _LAUNCHER,
    "nnodes": _LAUNCHER,
    "nproc-per-node": _LAUNCHER,
    "dataloader-num-workers": "samples come from token files, without workers; leave it out",
    "remove-unused-columns": f"{_TEXT}; leave it out",
    "packing": "pretraining packs documents into samples; finetune_sft.py packs conversations",
    "completion-only-loss": f"{_CHAT}, which trains on answers only",
    "assistant-only-loss": f"{_CHAT}, which trains on answers only",
    "data": _TEXT,
    "dataset-name": _TEXT,
    "dataset-path": _TEXT,
    "train-file": _TEXT,
    "training.dataset": _TEXT,
    "dataset-text-field": f"{_TEXT}; its --json-keys names the field",
    "report-to": _REPORTS,
    "logger-name": _REPORTS,
    "wandb-log": _WANDB,
    "enable-wandb": _WANDB,
    "use-wandb": _WANDB,
    "logging-strategy": "write --log-interval with a number of iterations",
    "use-peft": "write --lora-rank",
    "bias": "write --disable-bias-linear for a network without biases",
    "load-in-8bit": "weights are not quantized for training; write --bf16",
    "load-in-4bit": "weights are not quantized for training; write --bf16",
    "overwrite-output-dir": "a run writes to a new --save, or resumes with --load; leave it out",
    "min-lr-factor": "write --min-lr: the rate itself, not its share of --lr",
    "decay-lr": "write --lr-decay-style, which has constant too",
    "decay-ratio": "write --lr-decay-iters",
    "num-samples": "write --train-samples",
    "name": "write --preset for a network, --optimizer, or --wandb-exp-name for a run",
    "enable": "write the flag of the feature: --save, --tensorboard-dir, --profile or --compile",
    "kv-heads": "write --group-query-attention --num-query-groups",
    "attention-heads": "write --num-attention-heads",
}

TRAINER_NAMES: Mapping[str, str] = {
    **{name: f"write {flag}" for flag, names in _TWINS.items() for name in names.split()},
    **_ANSWERS,
}
"""By name with hyphens, what to write in place of it; by "NAME VALUE", in place of a switch's value."""
