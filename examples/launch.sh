# Sourced by the examples: `launch SCRIPT FLAG…` becomes the run, and prints its command before.
#
#   NNODES, GPUS_PER_NODE     nodes, and processes on each, one for a GPU or a part of a CPU (1, 1)
#   NODE_RANK                 which of the nodes this is, from 0 (0)
#   MASTER_ADDR, MASTER_PORT  a name of node 0 that all know, a free port there (localhost, 6000)
#   LAUNCHER                  what starts the processes, if not torch's launcher
#   PLAN                      set, even if empty: start nothing, and tell what the run would need;
#                             it may hold flags of tools/plan.py, such as "--gpu a100-80gb"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

launch() {
    local processes=$((${NNODES:-1} * ${GPUS_PER_NODE:-1})) launcher=(python)
    if ((processes > 1)); then
        launcher=(python -m torch.distributed.run
            --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}"
            --nproc_per_node "${GPUS_PER_NODE:-1}"
            --master_addr "${MASTER_ADDR:-localhost}" --master_port "${MASTER_PORT:-6000}")
    fi
    if [[ -n ${LAUNCHER:-} ]]; then
        read -ra launcher <<< "$LAUNCHER"
    fi
    local script=$repository/$1 own=()
    if [[ -v PLAN ]]; then
        read -ra own <<< "--num-gpus $processes $PLAN"
        case $1 in
            pretrain_bert.py) own+=(--objective bert) ;;
            pretrain_t5.py) own+=(--objective t5) ;;
        esac
        launcher=(python) script=$repository/tools/plan.py
    fi
    set -x
    exec "${launcher[@]}" "$script" "${own[@]}" "${@:2}"
}
