#!/usr/bin/env bash
# Step 4 of detoxification: turn the selected texts in INPUT into token files
# PREFIX_text_document.bin and .idx. Further words are flags of tools/preprocess_data.py.
#
#   VOCAB_FILE=gpt2-vocab.json MERGE_FILE=gpt2-merges.txt \
#       bash examples/detxoify_lm/annotations/preprocess.sh INPUT PREFIX

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch.sh"
unset PLAN

GPUS_PER_NODE=1 NNODES=1 launch tools/preprocess_data.py \
    --input "${1:?the file of texts}" \
    --output-prefix "${2:?the prefix of the token files}" \
    --tokenizer-type GPT2BPETokenizer \
    --vocab-file "${VOCAB_FILE:-gpt2-vocab.json}" \
    --merge-file "${MERGE_FILE:-gpt2-merges.txt}" \
    --append-eod \
    --workers "${WORKERS:-20}" \
    "${@:3}"
