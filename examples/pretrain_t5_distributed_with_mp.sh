#!/usr/bin/env bash
# The run of pretrain_t5_distributed.sh with each layer divided over TENSOR_PARALLEL GPUs and the
# layers over PIPELINE_PARALLEL stages; what is left of the GPUs holds replicas. Keep
# TENSOR_PARALLEL within a node, and MICRO_BATCHES well above the number of stages. The decoder
# begins at the stage SPLIT_RANK.
#
#   TENSOR_PARALLEL=2 PIPELINE_PARALLEL=2 DATA_PATH=… \
#       bash examples/pretrain_t5_distributed_with_mp.sh

set -euo pipefail

tensor=${TENSOR_PARALLEL:-2} stages=${PIPELINE_PARALLEL:-2}
split=()
if ((stages > 1)); then
    split=(--pipeline-model-parallel-split-rank "${SPLIT_RANK:-$((stages / 2))}")
fi
export NNODES=${NNODES:-1} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
export MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-16}
replicas=$((NNODES * GPUS_PER_NODE / (tensor * stages)))
export GLOBAL_BATCH_SIZE=${GLOBAL_BATCH_SIZE:-$((
    MICRO_BATCH_SIZE * ${MICRO_BATCHES:-$((2 * stages))} * replicas
))}

exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_t5_distributed.sh" \
    --tensor-model-parallel-size "$tensor" --pipeline-model-parallel-size "$stages" "${split[@]}" "$@"
