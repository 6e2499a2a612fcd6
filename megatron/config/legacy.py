"""Flags of other systems that have no field here, each with the sentence its user gets."""

from megatron.config.flags import Legacy

LEGACY = (
    Legacy("--batch-size", "write --micro-batch-size instead", takes=1, refused=True),
    Legacy("--warmup", "write --lr-warmup-fraction instead", takes=1, refused=True),
    Legacy("--deepspeed", "every run goes through DeepSpeed, with or without this flag"),
    Legacy("--use-deepspeed", "every run goes through DeepSpeed, with or without this flag"),
    Legacy(
        "--deepspeed-activation-checkpointing",
        "recomputation always goes through DeepSpeed; --checkpoint-activations turns it on",
    ),
    Legacy("--DDP-impl", "DeepSpeed reduces the gradients; nothing to choose", takes=1),
    Legacy(
        "--num-workers",
        "samples are read from memory-mapped files by the training process itself",
        takes=1,
    ),
    Legacy(
        "--valid-num-workers",
        "samples are read from memory-mapped files by the training process itself",
        takes=1,
    ),
    Legacy("--mmap-warmup", "files are mapped; the first reading of a page warms it up"),
    Legacy("--fim-data", "documents are rearranged when --fim-rate is above 0"),
    Legacy("--fim-eod-token", "the tokenizer knows which token ends a document", takes=1),
    Legacy(
        "--num-layers-per-virtual-pipeline-stage",
        "DeepSpeed's pipeline has no interleaved schedule; leave this flag out",
        takes=1,
        refused=True,
    ),
)
