"""Flags of Megatron-LM and deepspeedai's program for data, tokenizers, steps and the optimizer."""

from megatron.config.foreign_flags.tables import accepted, read_as, refused

_EFFICIENCY = (
    "samples are not chosen by difficulty, nor tokens dropped; curriculum_learning in DeepSpeed's "
    "JSON shortens samples: write that, and leave this flag out"
)

DATA_FLAGS = (
    *accepted(
        "token files are read as needed, and their index is cached: samples are the same",
        """no-mmap-bin-files num-dataset-builder-threads dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap per-dataset-sequences-path lazy-loader""",
    ),
    *refused(
        "write --reset-attention-mask instead, and --reset-position-ids where positions start again",
        "dataloader-inter-document-masking",
    ),
    *refused(
        "a run has one blend; start the next phase with --load and its own --data-path, and leave "
        "this flag out",
        "phase-transition-iterations",
    ),
    *accepted("padding is masked by its position, whatever its id", "allow-ambiguous-pad-tokens"),
    *refused(
        _EFFICIENCY,
        """data-efficiency-curriculum-learning random-ltd return-data-index use-dataset-only
        train-idx-path train-desc-path train-doc-idx-path train-sample-idx-path
        train-shuffle-idx-path""",
    ),
    *refused("write --data-path with a local copy instead", "aml-data-download-path"),
    *accepted("a resumed run always continues with the next sample", "resume-dataloader"),
    *refused("write --train-samples with the samples of one epoch instead", "train-full-dataset"),
    *refused(
        "--mock-data makes random tokens, in samples of --seq-length; leave this flag out",
        "sft-mock-dataset-config-json varlen-mock-dataset-config-json",
    ),
    *refused(
        "--mask-prob sets the share of masked tokens in a sample; leave this flag out",
        "max-preds-per-seq",
    ),
    *read_as("sft", "it takes no value", switch="--objective sft"),
)

TOKEN_FLAGS = (
    *read_as("padded-vocab-size", "it takes a number", other="--pad-vocab-size-to {}"),
    *read_as("~pad-vocab-size", "it takes no value", switch="--make-vocab-size-divisible-by 1"),
    *read_as("tokenizer-special-tokens", "it takes tokens", other="--tiktoken-special-tokens {}"),
    *refused(
        "whitespace is handled as the SentencePiece model defines; leave this flag out",
        "~tokenizer-sentencepiece-ignore-extra-whitespaces",
    ),
    *refused(
        "conversations become token files with tools/preprocess_data.py --conversations "
        "--chat-template FILE",
        "chat-template use-varlen-dataset varlen-sbhd-validation",
    ),
    *refused("write --tokenizer-type and --vocab-file instead", "tokenizer-model-type"),
    *accepted(
        "the environment variable HF_HOME names the directory of what Hugging Face downloads",
        "cache-dir",
    ),
)

STEP_FLAGS = (
    *refused(
        "choose a --global-batch-size that is a multiple of --micro-batch-size * replicas, and "
        "leave this flag out",
        "decrease-batch-size-if-needed",
    ),
    *refused("evaluation begins with --eval-interval; leave this flag out", "start-eval-at-iter"),
    *refused(
        'each group of --valid-weighted-split-paths "NAME: 1 0:1 PREFIX" is evaluated under its NAME',
        "validation-set-names",
    ),
    *read_as(
        "activations-checkpoint-method",
        "it is uniform or block",
        uniform="--recompute-granularity full --recompute-method uniform",
        block="--recompute-granularity full --recompute-method block",
    ),
    *read_as(
        "activations-checkpoint-num-layers", "it takes a number", other="--recompute-num-layers {}"
    ),
    *accepted(
        "of its modules only core_attn is recomputed alone, by --recompute-granularity selective; "
        "activations of the others (layernorm, mla_up_proj, mlp, moe, moe_act, shared_experts) are "
        "kept, which takes more memory than in Megatron-LM: --recompute-granularity full recomputes "
        "each layer; results are the same",
        "recompute-modules",
    ),
    *accepted(
        "losses are checked unless --no-check-for-nan-in-loss-and-grad is given",
        "check-for-nan-in-loss-and-grad",
    ),
    *accepted(
        "the loss that is trained on is logged; --calculate-per-token-loss weighs its tokens equally",
        "sft-loss-log-mode",
    ),
    *refused("write --config FILE instead: YAML with the flags of this program", "yaml-cfg"),
)

OPTIMIZER_FLAGS = (
    *refused(
        "queries and keys are not rescaled after a step; --qk-layernorm bounds them: leave this flag "
        "out",
        "qk-clip qk-clip-alpha qk-clip-threshold",
    ),
    *accepted(
        "it only changes how muon shares out the work: its step is the same",
        "muon-ns-batch-size muon-no-concurrent-groups",
    ),
    *refused(
        "muon steps routers like all matrices of layers; leave this flag out",
        "moe-router-skip-muon",
    ),
    *accepted("muon uses plain matrix products, with the same result", "muon-use-syrk"),
    *read_as(
        "muon-scalar-optimizer",
        "parameters that are no matrices of layers use AdamW; leave this flag out",
        adam="",
    ),
    *read_as(
        "muon-coefficient-type",
        "muon has one set of coefficients, called simple; leave this flag out",
        simple="",
    ),
    *refused(
        "weights decay, biases and norms do not; write --apply-wd-to-qk-layernorm for those of "
        "queries and keys, and leave this flag out",
        "no-weight-decay-cond-type",
    ),
    *refused(
        "write --freeze with patterns of the names that are not trained, --bitfit to train biases "
        "alone, or --lora-rank for adapters",
        "freeze-all-layers",
    ),
)
