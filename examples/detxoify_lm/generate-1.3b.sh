#!/usr/bin/env bash
# Step 6 of detoxification: continue each line of PROMPTS, which has every prompt 25 times in a row,
# with the newest checkpoint in CHECKPOINT, to PROMPTS_output_NAME_seed_SEED.jsonl, NAME being the
# last part of CHECKPOINT. Run again, it continues. Further words are flags: docs/detoxification.md.
#
#   SEED=1234 bash examples/detxoify_lm/generate-1.3b.sh PROMPTS CHECKPOINT
#
# Of a file that has every prompt once: --continuations-per-prompt 25 after CHECKPOINT.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"
unset PLAN

prompts=${1:?the file of prompts} checkpoint=${2:?the directory of checkpoints} seed=${SEED:-1234}

launch examples/detxoify_lm/generate_samples_gpt.py \
    --load "$checkpoint" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-400}" \
    --sample-input-file "$prompts" \
    --sample-output-file "${prompts}_output_$(basename "$checkpoint")_seed_$seed.jsonl" \
    --out-seq-length 20 \
    --temperature 1.0 \
    --top_p 0.9 \
    --seed "$seed" \
    "${@:3}"
