#!/usr/bin/env bash
# The run of pretrain_gpt.sh on all GPUs of this machine, or two processes where there is none,
# under DeepSpeed's launcher; the replicas divide the optimizer's state (ZERO_STAGE).
#
#   DATA_PATH=my_text_document GPUS_PER_NODE=4 bash examples/pretrain_gpt_single_node.sh

set -euo pipefail

export GPUS_PER_NODE=${GPUS_PER_NODE:-$(
    python -c 'import torch; print(torch.cuda.device_count() or 2)'
)}
launcher="deepspeed --num_gpus $GPUS_PER_NODE --master_port ${MASTER_PORT:-6000}"
export LAUNCHER=${LAUNCHER:-$launcher}
export GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-$((${MICRO_BATCH_SIZE:-4} * GPUS_PER_NODE))}

exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt.sh" --zero-stage "${ZERO_STAGE:-1}" "$@"
