#!/usr/bin/env bash
# The run of pretrain_gpt_single_node.sh with short samples first (arXiv:2108.06084): they grow from
# MIN_LENGTH tokens to SEQ_LENGTH in CURRICULUM_STEPS iterations, in multiples of LENGTH_STEP.
#
#   DATA_PATH=my_text_document bash examples/pretrain_gpt_curriculum.sh

set -euo pipefail

export CHECKPOINT_PATH=${CHECKPOINT_PATH:-checkpoints} SEQ_LENGTH=${SEQ_LENGTH:-1024}
mkdir -p "$CHECKPOINT_PATH"
json=$CHECKPOINT_PATH/curriculum.json
cat > "$json" << JSON
{
  "curriculum_learning": {
    "enabled": true,
    "curriculum_type": "seqlen",
    "min_difficulty": ${MIN_LENGTH:-64},
    "max_difficulty": $SEQ_LENGTH,
    "schedule_type": "${SCHEDULE:-fixed_linear}",
    "schedule_config": {
      "total_curriculum_step": ${CURRICULUM_STEPS:-15000},
      "difficulty_step": ${LENGTH_STEP:-8}
    }
  }
}
JSON

exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_single_node.sh" \
    --deepspeed --deepspeed_config "$json" "$@"
