"""Flags of other systems for data, runs and checkpoints: what to write instead."""

from collections.abc import Mapping
from typing import Any

from megatron.config.parsing.flags import Legacy

_SETS = 'write --train-weighted-split-paths "NAME: 1 0:1 PREFIX", and the same for valid and test'
_COLLECTED = "Python's automatic garbage collection is used"
_OURS = "there is one implementation of the network, chosen by its own flags"

DATA_LEGACY = (
    Legacy(
        "--num-workers",
        "samples are read from token files by the training process itself",
        takes=1,
    ),
    Legacy(
        "--valid-num-workers",
        "samples are read from token files by the training process itself",
        takes=1,
    ),
    Legacy("--mmap-warmup", "token files are read as needed, not mapped into memory"),
    Legacy("--fim-data", "fill-in-the-middle is on when --fim-rate is above 0"),
    Legacy("--fim-eod-token", "the EOD token is the tokenizer's", takes=1),
    *(
        Legacy(option, _SETS, takes="*", refused=True)
        for option in ("--train-data-path", "--valid-data-path", "--test-data-path")
    ),
    Legacy(
        "--data-args-path",
        "write the words of that file after --data-path",
        takes=1,
        refused=True,
    ),
    Legacy("--per-split-data-args-path", _SETS, takes=1, refused=True),
    Legacy(
        "--full-validation",
        "--eval-iters sets how many global batches of a validation set are read",
        refused=True,
    ),
    Legacy(
        "--multiple-validation-sets",
        "each group of --valid-weighted-split-paths is evaluated by itself",
        refused=True,
    ),
    Legacy(
        "--train-data-exact-num-epochs",
        "write --train-samples: the samples of an epoch, times the epochs",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--no-shuffle",
        "samples are shuffled in every run, the same way with the same --seed; leave this flag out",
        refused=True,
    ),
    Legacy(
        "--new-dataset",
        "there is one way to read token files: --data-path names them; leave this flag out",
        refused=True,
    ),
    Legacy("--repeated-dataloader", "the data are repeated for as many epochs as the run needs"),
    Legacy(
        "--no-create-attention-mask-in-dataloader",
        "attention masks are made where they are used, in every run",
    ),
)

CHECKPOINT_LEGACY = (
    Legacy("--load-tag", "write --ckpt-step with the iteration", takes=1, refused=True),
    Legacy("--reset-iteration", "write --reset-progress instead", refused=True),
    Legacy("--no-load-lr-state", "write --override-lr-scheduler instead", refused=True),
    Legacy("--ckpt-format", "DeepSpeed writes the checkpoints of every run", takes=1),
    Legacy(
        "--stagger_checkpoint_save_load_group_size",
        "all ranks read and write their own files at the same time",
        takes=1,
    ),
)

RUN_LEGACY = (
    Legacy(
        "--adaptive_seq_len",
        "evaluation batches texts of similar length and pads to the longest of a batch",
    ),
    Legacy(
        "--iterations-to-skip",
        "write --skip-train-iteration-range FIRST-LAST instead",
        takes="*",
        refused=True,
    ),
    Legacy("--eval-first", "run once with --eval-only, then without it", refused=True),
    Legacy(
        "--rerun-mode",
        "steps are not rerun; --max-nan-steps and --replica-check-interval end a run with wrong"
        " results",
        takes=1,
    ),
    Legacy("--no-optimizer-fusion", "apex steps only with --optimizer-impl apex"),
    Legacy("--manual-gc", _COLLECTED),
    Legacy("--manual-gc-interval", _COLLECTED, takes=1),
    Legacy(
        "--timing-log-option",
        "the timers of rank 0 are logged; leave this flag out",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--log-straggler",
        "write --slow-rank-factor 1.2: it logs ranks that take longer than others by that factor",
        refused=True,
    ),
    Legacy("--log-throughput", "the log line always has samples and operations per second"),
    Legacy("--log-world-size-to-tensorboard", "it is written at the start of every run"),
    Legacy("--log-memory-to-tensorboard", "it is written with each log line of every run"),
    Legacy(
        "--log-optimizer-states-to-tensorboard",
        "the norms of optimizer states are not plotted; --log-params-norm plots that of the weights",
    ),
    Legacy(
        "--tensorboard-debug-dir",
        "there is one directory of scalars, that of --tensorboard-dir; --profile-dir takes traces",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--ds-inference",
        "generation has its own KV cache and weight layout, without kernels of DeepSpeed",
    ),
    Legacy("--transformer-impl", _OURS, takes=1),
    Legacy("--use-mcore-models", _OURS),
)

_MULTIMODAL = "models are trained on text alone, so there is no MultimodalTokenizer; leave it out"
_ONE_FILE = "write --tokenizer-type and the files of the tokenizer instead"
_NULL = "NullTokenizer ends documents with the id --vocab-size and pads with nothing; leave it out"

TOKENIZER_LEGACY = (
    Legacy(
        "--trust-remote-code",
        "write --tokenizer-kwargs trust_remote_code true, which runs the Python code in the "
        "tokenizer's directory",
        refused=True,
    ),
    Legacy(
        "--tokenizer-hf-no-use-fast",
        "write --tokenizer-kwargs use_fast false instead",
        refused=True,
    ),
    Legacy("--tokenizer-metadata", _ONE_FILE, takes=1, refused=True),
    Legacy("--metadata-path", _ONE_FILE, takes=1, refused=True),
    Legacy("--null-tokenizer-eod-id", _NULL, takes=1, refused=True),
    Legacy("--null-tokenizer-pad-id", _NULL, takes=1, refused=True),
    Legacy(
        "--sft-tokenizer-prompt-format",
        "conversations become token files with tools/preprocess_data.py --conversations "
        "--chat-template FILE",
        takes=1,
        refused=True,
    ),
    Legacy("--tokenizer-prompt-format", _MULTIMODAL, takes=1, refused=True),
    Legacy("--image-tag-type", _MULTIMODAL, takes=1, refused=True),
    Legacy("--force-system-message", _MULTIMODAL, refused=True),
    Legacy(
        "--use-gigatoken",
        "gigatoken encodes wherever it gives the same ids; --tokenizer-backend chooses",
    ),
)

ANY_RUN: Mapping[str, Mapping[str, Any]] = {
    "model": {"num_layers": 0, "hidden_size": 0, "num_attention_heads": 0, "seq_length": 0},
    "schedule": {"lr": 0.0},
    "training": {"micro_batch_size": 1, "train_iters": 1},
    "data": {"data_path": ["unknown"]},
}
"""Values for the required flags of an unknown run; the network comes from the files."""

CONVERSION_LEGACY = (
    Legacy("--max-queue-size", "tensors are read and written one by one: there is no queue", 1),
    Legacy("--megatron-path", "no code of Megatron-LM's is needed to read its files", 1),
    Legacy("--no-checking", "every parameter and its shape are checked"),
    Legacy("--model-size", "the size is that of the files", 1),
    Legacy("--checkpoint-type", "the format is read from the files, or set by --loader", 1),
)
"""Flags of Megatron-LM's conversion tool without effect here."""
