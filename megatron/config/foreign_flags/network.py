"""Flags of other systems for the network: what to write instead."""

from megatron.config.foreign_flags.tables import refused
from megatron.config.parsing.flags import Legacy

_RETRIEVAL = "retrieval models are not built: this is a flag of ICT, REALM and ORQA"
_EQUAL = (
    "replicated weights of tensor-parallel ranks start equal and get equal gradients: there"
    " is nothing to synchronize"
)
_SPANS = "span lengths of T5 are those of Megatron-LM; --mask-prob sets the share of masked tokens"
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
        "rotary embeddings pair the halves of the features: the same network, with rows of "
        "queries and keys in another order",
    ),
    Legacy(
        "--fp16-lm-cross-entropy",
        "the loss is always computed in fp32, because of large vocabularies",
    ),
    Legacy(
        "--use-cpu-initialization",
        "weights are always initialized on the CPU, so they do not depend on the layout",
    ),
    Legacy(
        "--force-sync-layer-norm-parameters",
        _EQUAL,
    ),
    Legacy(
        "--embedding-weights-in-fp32",
        "master weights are fp32; leave this flag out",
        refused=True,
    ),
    Legacy("--fp8-e4m3", "write --fp8-format e4m3, its name today", refused=True),
    Legacy("--fp8-hybrid", "write --fp8-format hybrid, its name today", refused=True),
    Legacy("--fp8-margin", _NO_HISTORY, takes=1),
    Legacy("--fp8-interval", _NO_HISTORY, takes=1),
    Legacy("--fp8-amax-history-len", _NO_HISTORY, takes=1),
    Legacy("--fp8-amax-compute-algo", _NO_HISTORY, takes=1),
    Legacy("--scattered-embeddings", _DEAD),
    Legacy("--memory-centric-tiled-linear", _DEAD),
    Legacy("--tile-factor", _DEAD, takes=1),
    Legacy(
        "--split-transformers",
        "it only changed how DeepSpeed divides recomputation; --checkpoint-activations turns it on",
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

_GROUPED = (
    "experts use grouped matrix products, and tokens are exchanged with all-to-alls of uneven sizes"
)
_LOADS = "the log has sums over all layers, and the loads of the least balanced layer"

EXPERT_LEGACY = (
    Legacy(
        "--create-moe-param-group",
        "experts get their own parameter groups where they are needed",
    ),
    Legacy(
        "--enable-expert-tensor-parallelism",
        "experts are divided over the tensor-parallel ranks like every layer",
    ),
    Legacy("--moe-permute-fusion", _GROUPED),
    Legacy("--moe-use-legacy-grouped-gemm", _GROUPED),
    Legacy("--moe-shared-expert-overlap", "shared experts are computed after the others"),
    Legacy("--moe-per-layer-logging", _LOADS),
    Legacy("--log-moe-overload-factor", _LOADS),
    Legacy("--use-tutel", _GROUPED),
    Legacy("--moe-router-dtype", "the router always computes in fp32", takes=1),
    Legacy(
        "--moe-pad-expert-input-to-capacity",
        "inputs of experts are not padded to their capacity; results are the same",
    ),
    Legacy("--num-experts-switch", "write --num-experts instead", takes=1, refused=True),
)
