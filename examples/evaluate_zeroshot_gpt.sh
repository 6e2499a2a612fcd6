#!/usr/bin/env bash
# Evaluate the newest checkpoint in CHECKPOINT_PATH on a text that it was not trained for: the
# perplexity of WikiText (TASK=WIKITEXT103), or the last words of LAMBADA (TASK=LAMBADA).
#
#   CHECKPOINT_PATH=checkpoints VALID_DATA=wiki.test.tokens bash examples/evaluate_zeroshot_gpt.sh
#   CHECKPOINT_PATH=checkpoints TASK=LAMBADA VALID_DATA=lambada_test.jsonl \
#       bash examples/evaluate_zeroshot_gpt.sh

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
unset PLAN

task=${TASK:-WIKITEXT103} strict=()
if [[ $task == LAMBADA ]]; then
    strict=(--strict-lambada)
fi

launch tasks/main.py \
    --task "$task" "${strict[@]}" \
    --valid-data "${VALID_DATA:?set it to the file of the task}" \
    --load "${CHECKPOINT_PATH:-checkpoints}" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-8}" \
    --log-interval "${LOG_INTERVAL:-10}" \
    "$@"
