"""Flags of other systems that have no field here, each with what happens or what to write instead."""

from megatron.config.foreign_flags.network import EXPERT_LEGACY, MODEL_LEGACY
from megatron.config.foreign_flags.run import (
    CHECKPOINT_LEGACY,
    DATA_LEGACY,
    RUN_LEGACY,
    TOKENIZER_LEGACY,
)
from megatron.config.parsing.flags import Legacy

_REDUCED = "DeepSpeed reduces the gradients; nothing to choose"
_OVERLAP = (
    "gradients are reduced beside the backward pass wherever that is possible: see "
    "docs/parallelism.md, Communication"
)
_GATHER = "in bf16 and at ZeRO stage 3, weights are gathered beside the forward pass in every run"
_COLLECTIVES = "gradients of tensor-parallel layers are reduced beside products in every run"
_CHUNKS = "samples are divided over ranks by --ds-sequence-parallel-size, not into chunks"
_OFFLOAD = "write --checkpoint-in-cpu, which keeps the inputs of recomputed layers in the host"
_EXACT = "weight gradients are added in the order of micro-batches in every run, as in 1F1B"

PARALLEL_LEGACY = (
    Legacy("--DDP-impl", _REDUCED, takes=1),
    Legacy("--use-contiguous-buffers-in-ddp", _REDUCED),
    Legacy("--no-contiguous-buffers-in-local-ddp", _REDUCED),
    Legacy(
        "--no-gradient-accumulation-fusion", "DeepSpeed adds gradients up, without such a kernel"
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
        "there are stages only when --pipeline-model-parallel-size is above 1",
    ),
    Legacy("--enable-zbh1-exact-semantics", _EXACT),
    Legacy(
        "--pipeline-model-parallel-layout",
        "write --pp-partition-method instead",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--lazy-mpu-init",
        "the groups of processes are made when a run starts; leave this flag out",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--deepspeed_mpi",
        "the variables of MPI are read where no launcher has set its own",
    ),
    Legacy(
        "--tp-comm-overlap",
        "products are not cut into pieces to overlap with their collectives; leave this flag out",
        refused=True,
    ),
    Legacy(
        "--hierarchical-context-parallel-sizes",
        "a sequence is divided in one way; write --context-parallel-size",
        takes="*",
        refused=True,
    ),
    Legacy("--force-ds-sequence-parallel", "--ds-sequence-parallel-size alone decides"),
    Legacy("--ds-sequence-parallel-fpdt", _CHUNKS, refused=True),
    Legacy("--ds-sequence-parallel-fpdt-chunk-size", _CHUNKS, takes=1, refused=True),
    Legacy("--ds-sequence-parallel-fpdt-offloading", _CHUNKS, refused=True),
    Legacy(
        "--data-parallel-random-init",
        "replicas begin with equal weights; leave this flag out",
        refused=True,
    ),
    Legacy(
        "--data-parallel-sharding-strategy",
        "write --zero-stage: 1 divides the optimizer, 2 the gradients too, 3 the weights too",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--num-distributed-optimizer-instances",
        "--use-distributed-optimizer divides it over all replicas; leave this flag out",
        takes=1,
        refused=True,
    ),
    Legacy(
        "--use-precision-aware-optimizer",
        "the optimizer keeps 32 bits, or 8 with --optimizer adam8bit; leave this flag out",
        refused=True,
    ),
    Legacy(
        "--recompute-modules",
        "--recompute-granularity selective recomputes the core of attention; leave this flag out",
        takes="*",
        refused=True,
    ),
    Legacy("--fine-grained-activation-offloading", _OFFLOAD, refused=True),
    Legacy("--offload-modules", _OFFLOAD, takes="*", refused=True),
)

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
