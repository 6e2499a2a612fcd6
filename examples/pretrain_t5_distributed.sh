#!/usr/bin/env bash
# The run of pretrain_t5.sh on NNODES nodes of GPUS_PER_NODE GPUs. Start it on each of them:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a DATA_PATH=… bash examples/pretrain_t5_distributed.sh
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node-a DATA_PATH=… bash examples/pretrain_t5_distributed.sh

set -euo pipefail

export NNODES=${NNODES:-1} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
export GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-$((${MICRO_BATCH_SIZE:-16} * GPUS_PER_NODE * NNODES))}

exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_t5.sh" --zero-stage "${ZERO_STAGE:-1}" "$@"
