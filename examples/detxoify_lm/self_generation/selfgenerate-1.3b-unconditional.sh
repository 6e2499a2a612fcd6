#!/usr/bin/env bash
# Step 1 of detoxification: generate N texts without a prompt, with the newest checkpoint in
# CHECKPOINT, to selfgeneration/unconditional_generation_NAME/SEED.out, NAME being the last part of
# CHECKPOINT. Run again, it continues. Further words are flags: docs/detoxification.md.
#
#   bash examples/detxoify_lm/self_generation/selfgenerate-1.3b-unconditional.sh N CHECKPOINT SEED

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../launch.sh"
unset PLAN

samples=${1:?the number of texts} checkpoint=${2:?the directory of checkpoints} seed=${3:?a seed}
folder=selfgeneration/unconditional_generation_$(basename "$checkpoint")
mkdir -p "$folder"

launch examples/detxoify_lm/generate_samples_gpt.py \
    --load "$checkpoint" \
    --micro-batch-size "${MICRO_BATCH_SIZE:-150}" \
    --num-samples "$samples" \
    --genfile "$folder/$seed.out" \
    --out-seq-length "${OUT_SEQ_LENGTH:-1000}" \
    --temperature 1.0 \
    --top_p 0.9 \
    --seed "$seed" \
    "${@:4}"
