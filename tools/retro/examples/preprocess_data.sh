#!/usr/bin/env bash
# Neighbors of the samples of a Retro, by chunks of Wikipedia's size: database, index, query.
#
#   bash tools/retro/examples/preprocess_data.sh [TASKS]       (build; or db-build, index-train, ...)
#
# Values of a small run are set by variables, and further flags follow the tasks.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../../examples/launch.sh"

launch tools/retro/preprocess_data.py \
    --retro-tasks "${1:-build}" \
    --retro-project-dir "${RETRO_PROJECT_DIR:-retro-project}" \
    --retro-gpt-data-path ${DATA_PATH:-corpus_text_document} \
    --retro-gpt-tokenizer-type "${TOKENIZER_TYPE:-GPT2BPETokenizer}" \
    --retro-gpt-vocab-file "${VOCAB_FILE:-vocab.json}" \
    --retro-gpt-merge-file "${MERGE_FILE:-merges.txt}" \
    --retro-gpt-split "${SPLIT:-98,2,0}" \
    --retro-gpt-train-samples "${TRAIN_SAMPLES:-200000}" \
    --retro-gpt-eval-interval "${EVAL_INTERVAL:-2000}" \
    --retro-gpt-eval-iters "${EVAL_ITERS:-50}" \
    --retro-gpt-global-batch-size "${GLOBAL_BATCH_SIZE:-256}" \
    --retro-gpt-seq-length "${SEQ_LENGTH:-2048}" \
    --retro-gpt-chunk-length "${CHUNK_LENGTH:-64}" \
    --retro-index-str "${INDEX_STR:-OPQ32_64,IVF65536_HNSW8,PQ32}" \
    --retro-index-ntrain "${INDEX_NTRAIN:-66625331}" \
    --retro-index-train-load-fraction "${INDEX_TRAIN_LOAD_FRACTION:-0.97}" \
    --retro-index-add-load-fraction "${INDEX_ADD_LOAD_FRACTION:-0.95}" \
    --retro-query-ef-search "${QUERY_EF_SEARCH:-32}" \
    --retro-query-nprobe "${QUERY_NPROBE:-4096}" \
    "${@:2}"
