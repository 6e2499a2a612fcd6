#!/usr/bin/env bash
# Continue PROMPT with the newest checkpoint in CHECKPOINT_PATH. The sizes of the network and the
# tokenizer come from there. Words after the script's name are further flags: docs/generation.md.
#
#   CHECKPOINT_PATH=checkpoints PROMPT="Once upon a time" bash examples/generate_text.sh

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
unset PLAN

launch tools/generate_samples_gpt.py \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --prompt "${PROMPT:-Once upon a time}" \
    --out-seq-length "${OUT_SEQ_LENGTH:-256}" \
    --temperature "${TEMPERATURE:-1.0}" \
    --top_p "${TOP_P:-0.9}" \
    --seed "${SEED:-1234}" \
    "$@"
