"""Flags of other systems that have no field here, each with what happens or what to write instead."""

from megatron.config.foreign_flags.network import EXPERT_LEGACY, MODEL_LEGACY
from megatron.config.foreign_flags.parallelism import PARALLEL_LEGACY
from megatron.config.foreign_flags.run import (
    CHECKPOINT_LEGACY,
    DATA_LEGACY,
    RUN_LEGACY,
    TOKENIZER_LEGACY,
)
from megatron.config.parsing.flags import Legacy

LEGACY = (
    Legacy(
        "--use-flash-attn-builder",
        "nothing is compiled at the start of a run; --use-flash-attn takes the installed package",
    ),
    Legacy(
        "--attention-backend",
        "write --attention-impl instead: flash for flash, sdpa for fused, fused-softmax for unfused, "
        "reference for local; leave it out for auto",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--no-persist-layer-norm",
        "norms have one fused kernel for every width; --no-layer-norm-fusion turns it off",
    ),
    Legacy("--max-seq-length", "write --seq-length instead", takes=1, refused=True),
    Legacy("--batch-size", "write --micro-batch-size instead", takes=1, refused=True),
    Legacy("--warmup", "write --lr-warmup-fraction instead", takes=1, refused=True),
    Legacy("--deepspeed", "every run goes through DeepSpeed, with or without this flag"),
    Legacy("--use-deepspeed", "every run goes through DeepSpeed, with or without this flag"),
    Legacy(
        "--deepspeed-activation-checkpointing",
        "recomputation always goes through DeepSpeed; --checkpoint-activations turns it on",
    ),
    Legacy(
        "--muon-tp-mode",
        "muon gathers divided matrices, so its step is that of the full matrix in every layout",
        takes=1,
    ),
    Legacy("--muon-no-split-qkv", "muon takes queries, keys and values as one matrix"),
    Legacy(
        "--muon-fp32-matmul-prec",
        "muon multiplies in the dtype of the network",
        takes=1,
    ),
    Legacy(
        "--adlr-autoresume",
        "it needs a module of NVIDIA's own clusters; --exit-signal-handler and "
        "--exit-duration-in-mins save in time, and --load continues",
        refused=True,
    ),
    Legacy("--adlr-autoresume-interval", "there is no --adlr-autoresume to time", takes=1),
    Legacy("--deepscale", "every run goes through DeepSpeed, which had this name once"),
    Legacy("--deepscale_config", "write --deepspeed_config instead", takes=1, refused=True),
    *RUN_LEGACY,
    *DATA_LEGACY,
    *TOKENIZER_LEGACY,
    *CHECKPOINT_LEGACY,
    *PARALLEL_LEGACY,
    *MODEL_LEGACY,
    *EXPERT_LEGACY,
)
