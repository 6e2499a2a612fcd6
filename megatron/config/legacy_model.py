"""Flags of other systems about networks, each with the sentence its user gets."""

from megatron.config.flags import Legacy

_MUP = "maximal update parametrization is not built; choose --lr and --init-method-std yourself"
_VISION = "vision models are not built: this is a flag of ViT"
_RETRIEVAL = "retrieval models are not built: this is a flag of ICT, REALM and ORQA"
_DEAD = "it has no effect in the systems that have it, and none here"

MODEL_LEGACY = (
    Legacy(
        "--sync-tp-duplicated-parameters",
        "copies of a weight on tensor-parallel ranks begin equal, get equal gradients and stay "
        "equal: there is nothing to synchronise",
    ),
    Legacy(
        "--apply-query-key-layer-scaling",
        "it is on unless --no-query-key-layer-scaling is given",
    ),
    Legacy(
        "--rotary-interleaved",
        "features are turned in halves, as in Llama's published weights; neighbouring pairs are "
        "another order of the rows of queries and keys",
        refused=True,
    ),
    Legacy("--scattered-embeddings", _DEAD),
    Legacy("--memory-centric-tiled-linear", _DEAD),
    Legacy("--tile-factor", _DEAD, takes=1),
    Legacy(
        "--split-transformers",
        "it only told DeepSpeed how many parts of a network to recompute; "
        "--checkpoint-activations decides",
    ),
    Legacy("--bert-no-binary-head", "a GPT has no binary head"),
    Legacy("--mup", _MUP, refused=True),
    *(
        Legacy(option, _MUP, takes=1, refused=True)
        for option in ("--mup-input-mult", "--mup-output-mult", "--mup-attn-mult")
    ),
    *(
        Legacy(option, _VISION, takes=1, refused=True)
        for option in ("--num-classes", "--img-dim", "--num-channels", "--patch-dim")
    ),
    *(
        Legacy(option, _RETRIEVAL, refused=True)
        for option in (
            "--biencoder-shared-query-context-model",
            "--use-one-sent-docs",
            "--retriever-score-scaling",
        )
    ),
    *(
        Legacy(option, _RETRIEVAL, takes=1, refused=True)
        for option in (
            "--ict-head-size",
            "--ict-load",
            "--bert-load",
            "--biencoder-projection-dim",
            "--titles-data-path",
            "--query-in-block-prob",
            "--evidence-data-path",
            "--block-data-path",
            "--embedding-path",
            "--indexer-batch-size",
            "--indexer-log-interval",
        )
    ),
    Legacy("--retriever-report-topk-accuracies", _RETRIEVAL, takes="*", refused=True),
)
