"""Flags of other systems for the network: what to write instead."""

from megatron.config.foreign_flags.tables import refused
from megatron.config.parsing.flags import Legacy

_RETRIEVAL = "retrieval models are not built: this is a flag of ICT, REALM and ORQA"
_EQUAL = (
    "copies of a weight on tensor-parallel ranks begin equal, get equal gradients and stay equal: "
    "there is nothing to synchronise"
)
_SPANS = "the lengths of T5's spans are those of Megatron-LM; --mask-prob sets their share"
_NO_HISTORY = "the scale of an fp8 tensor is computed from the tensor itself, without a history"
_DEAD = "it has no effect in the systems that have it, and none here"


MODEL_LEGACY = (
    Legacy(
        "--sync-tp-duplicated-parameters",
        _EQUAL,
    ),
    Legacy(
        "--apply-query-key-layer-scaling",
        "it is on unless --no-query-key-layer-scaling is given",
    ),
    Legacy(
        "--rotary-interleaved",
        "features are turned in halves: the same network, with the rows of queries and keys in "
        "another order",
    ),
    Legacy(
        "--fp16-lm-cross-entropy",
        "the loss is computed in 32 bits in every run: 16 bits lose the tail of a large vocabulary",
    ),
    Legacy(
        "--use-cpu-initialization",
        "weights are drawn on the CPU in every run, so they do not depend on the layout",
    ),
    Legacy(
        "--force-sync-layer-norm-parameters",
        _EQUAL,
    ),
    Legacy(
        "--embedding-weights-in-fp32",
        "the optimizer keeps all weights in 32 bits; leave this flag out",
        refused=True,
    ),
    Legacy("--fp8-e4m3", "it is now --fp8-format e4m3: write that", refused=True),
    Legacy("--fp8-hybrid", "it is now --fp8-format hybrid: write that", refused=True),
    Legacy("--fp8-margin", _NO_HISTORY, takes=1),
    Legacy("--fp8-interval", _NO_HISTORY, takes=1),
    Legacy("--fp8-amax-history-len", _NO_HISTORY, takes=1),
    Legacy("--fp8-amax-compute-algo", _NO_HISTORY, takes=1),
    Legacy("--scattered-embeddings", _DEAD),
    Legacy("--memory-centric-tiled-linear", _DEAD),
    Legacy("--tile-factor", _DEAD, takes=1),
    Legacy(
        "--split-transformers",
        "it only set in how many parts DeepSpeed recomputes a network; "
        "--checkpoint-activations decides",
    ),
    *refused(_SPANS, "noise-density mean-noise-span-length"),
    *refused(
        _RETRIEVAL,
        """biencoder-shared-query-context-model use-one-sent-docs retriever-score-scaling
        faiss-use-gpu output-bert-embeddings bert-embedder-type retriever-report-topk-accuracies
        ict-head-size ict-load bert-load biencoder-projection-dim titles-data-path
        query-in-block-prob evidence-data-path block-data-path embedding-path
        retriever-seq-length sample-rate indexer-batch-size indexer-log-interval""",
    ),
    Legacy(
        "--retro-workdir", "older form of --retro-project-dir: write that", takes=1, refused=True
    ),
    Legacy(
        "--retro-cyclic-train-iters",
        "samples repeat by themselves where --retro-no-verify-neighbor-count is given",
        takes=1,
    ),
    Legacy("--retro-return-doc-ids", "training does not read document ids"),
)

_GROUPED = "experts are computed in grouped products, and exchange tokens with uneven all-to-alls"

EXPERT_LEGACY = (
    Legacy(
        "--create-moe-param-group",
        "experts have parameter groups of their own where they need them",
    ),
    Legacy(
        "--enable-expert-tensor-parallelism",
        "experts are divided over the tensor-parallel ranks like every layer",
    ),
    Legacy("--moe-permute-fusion", _GROUPED),
    Legacy("--moe-use-legacy-grouped-gemm", _GROUPED),
    Legacy("--moe-shared-expert-overlap", "shared experts are computed after the others"),
    Legacy("--moe-per-layer-logging", "the log has the sums of all layers, and of loads the worst"),
    Legacy("--use-tutel", _GROUPED),
    Legacy(
        "--moe-router-dtype", "the router computes in 32 bits, also where this is fp64", takes=1
    ),
    Legacy(
        "--moe-pad-expert-input-to-capacity",
        "the inputs of experts are as long as the tokens that they get; padding changes no result",
    ),
    Legacy("--num-experts-switch", "write --num-experts instead", takes=1, refused=True),
)
