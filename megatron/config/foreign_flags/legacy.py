"""Flags of other systems that have no field here, each with what happens or what to write instead."""

from megatron.config.foreign_flags.checkpoints import CHECKPOINT_FLAGS, RESTART_FLAGS
from megatron.config.foreign_flags.communication import (
    GROUP_FLAGS,
    MEMORY_FLAGS,
    OVERLAP_FLAGS,
    SHARDING_FLAGS,
    STAGE_FLAGS,
)
from megatron.config.foreign_flags.kernels import KERNEL_FLAGS, MIXTURE_FLAGS, PRECISION_FLAGS
from megatron.config.foreign_flags.network import EXPERT_LEGACY, MODEL_LEGACY
from megatron.config.foreign_flags.reports import INFERENCE_FLAGS, REPORT_FLAGS
from megatron.config.foreign_flags.run import (
    CHECKPOINT_LEGACY,
    DATA_LEGACY,
    RUN_LEGACY,
    TOKENIZER_LEGACY,
)
from megatron.config.foreign_flags.tables import read_as
from megatron.config.foreign_flags.training import (
    DATA_FLAGS,
    OPTIMIZER_FLAGS,
    STEP_FLAGS,
    TOKEN_FLAGS,
)
from megatron.config.foreign_flags.unbuilt import METHOD_FLAGS, NETWORK_FLAGS
from megatron.config.parsing.flags import Legacy

_REDUCED = "DeepSpeed reduces the gradients, with one implementation"
_OVERLAP = (
    "gradient reduction overlaps with the backward pass wherever possible: see "
    "docs/parallelism.md, Communication"
)
_GATHER = "in bf16 and at ZeRO stage 3, gathering of weights always overlaps with the forward pass"
_COLLECTIVES = "gradient reduction of tensor-parallel layers always overlaps with matrix products"
_CHUNKS = "samples are divided over ranks by --ds-sequence-parallel-size, not into chunks"
_EXACT = "weight gradients are always accumulated in the order of micro-batches, as in 1F1B"

PARALLEL_LEGACY = (
    Legacy("--DDP-impl", _REDUCED, takes=1),
    Legacy("--use-contiguous-buffers-in-ddp", _REDUCED),
    Legacy("--no-contiguous-buffers-in-local-ddp", _REDUCED),
    Legacy(
        "--no-gradient-accumulation-fusion",
        "DeepSpeed accumulates gradients, without a fused kernel",
    ),
    Legacy("--overlap-grad-reduce", _OVERLAP),
    Legacy("--overlap-param-gather", _GATHER),
    Legacy("--no-async-tensor-model-parallel-allreduce", _COLLECTIVES),
    Legacy(
        "--no-scatter-gather-tensors-in-pipeline",
        "DeepSpeed's pipeline decides what its stages send; pipeline.pipe_partitioned in its JSON",
    ),
    Legacy(
        "--no-pipeline-parallel",
        "pipeline parallelism is on only when --pipeline-model-parallel-size is above 1",
    ),
    Legacy("--enable-zbh1-exact-semantics", _EXACT),
    Legacy(
        "--lazy-mpu-init",
        "process groups are created at the start of a run; leave this flag out",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--deepspeed_mpi",
        "MPI's environment variables are read if no launcher has set its own",
    ),
    Legacy("--force-ds-sequence-parallel", "--ds-sequence-parallel-size alone decides"),
    Legacy("--ds-sequence-parallel-fpdt", _CHUNKS, refused=True),
    Legacy("--ds-sequence-parallel-fpdt-chunk-size", _CHUNKS, takes=1, refused=True),
    Legacy("--ds-sequence-parallel-fpdt-offloading", _CHUNKS, refused=True),
    Legacy(
        "--data-parallel-random-init",
        "all data-parallel replicas start with the same weights; leave this flag out",
        refused=True,
    ),
)

LEGACY = (
    Legacy(
        "--use-flash-attn-builder",
        "nothing is compiled at the start of a run; --use-flash-attn takes the installed package",
    ),
    Legacy(
        "--no-persist-layer-norm",
        "norms have one fused kernel for every width; --no-layer-norm-fusion turns it off",
    ),
    Legacy("--max-seq-length", "write --seq-length instead", takes=1, refused=True),
    # Of Megatron-LM 1 and DeepSpeed's version of it.
    *read_as("batch-size", "it takes a number", other="--micro-batch-size {}"),
    *read_as("warmup", "it takes a number", other="--lr-warmup-fraction {}"),
    *read_as("pipe-parallel-size", "it takes a number", other="--pipeline-model-parallel-size {}"),
    Legacy("--deepspeed", "every run goes through DeepSpeed, with or without this flag"),
    Legacy("--use-deepspeed", "every run goes through DeepSpeed, with or without this flag"),
    Legacy(
        "--deepspeed-activation-checkpointing",
        "recomputation always goes through DeepSpeed; --checkpoint-activations turns it on",
    ),
    Legacy(
        "--muon-tp-mode",
        "muon gathers sharded matrices: its step is that of the full matrix in every layout",
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
        "it needs a module of NVIDIA's clusters; write --exit-duration-in-mins N to save and "
        "exit before a job ends, and --load to resume",
        refused=True,
    ),
    Legacy("--adlr-autoresume-interval", "--adlr-autoresume is not built", takes=1),
    Legacy("--deepscale", "every run goes through DeepSpeed, which had this name once"),
    Legacy("--deepscale_config", "write --deepspeed_config instead", takes=1, refused=True),
    *RUN_LEGACY,
    *DATA_LEGACY,
    *TOKENIZER_LEGACY,
    *CHECKPOINT_LEGACY,
    *PARALLEL_LEGACY,
    *MODEL_LEGACY,
    *EXPERT_LEGACY,
    *CHECKPOINT_FLAGS,
    *RESTART_FLAGS,
    *GROUP_FLAGS,
    *OVERLAP_FLAGS,
    *SHARDING_FLAGS,
    *STAGE_FLAGS,
    *MEMORY_FLAGS,
    *KERNEL_FLAGS,
    *PRECISION_FLAGS,
    *NETWORK_FLAGS,
    *METHOD_FLAGS,
    *MIXTURE_FLAGS,
    *DATA_FLAGS,
    *TOKEN_FLAGS,
    *STEP_FLAGS,
    *OPTIMIZER_FLAGS,
    *REPORT_FLAGS,
    *INFERENCE_FLAGS,
)
