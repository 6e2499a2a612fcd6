# Sourced by the scripts of this folder. What they share is said by variables:
#
#   REPOSITORY   folder of this repository, which all nodes see (where sbatch was typed)
#   PYTHON       the Python that has requirements.txt, at the same place on all nodes (python)
#   TRAIN        what trains: a script of REPOSITORY (pretrain_gpt.py)
#   SAVE         folder of the checkpoints, which all nodes see; a run goes on from the newest
#   BASE         folder of the checkpoints of another run, from whose weights this one begins
#   KILL_SWITCH  while this file is there a run saves and ends, and none starts (SAVE/stop)
#   GRACE_S      seconds that processes have to leave once the first one has (600)

set -euo pipefail

PYTHON=${PYTHON:-python}

fail() {
    echo "error: $*" >&2
    exit 2
}

# Runs SCRIPT FLAG… once for each task of the job; gives the highest exit code among them. Each finds
# its rank, and where all meet, in SLURM's variables.
ranks() {
    # srun is not told by itself how many cores a task has.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    fi
    # Neighbours share a node. The first to leave with 75 must not have the others killed, who may
    # still save.
    srun --distribution=block --kill-on-bad-exit=0 --wait="${GRACE_S:-600}" "$PYTHON" "$@"
}

# Fails unless all nodes write to the folder $1, and see there what the first one has written.
check_shared() {
    local mark
    mkdir -p "$1" && mark=$(mktemp "$1/.seen-by-all-XXXXXX") ||
        fail "$SLURMD_NODENAME cannot write to $1"
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        bash -c '[[ -e $1 ]] && echo >> "$1" || { echo "$SLURMD_NODENAME" >&2; exit 2; }' \
        node "$mark" || fail "the nodes named above cannot write to $1, or see another folder there"
    rm "$mark"
}

# Fails unless the variable $1 is set, to what $2 says.
require() {
    [[ -n ${!1:-} ]] || fail "set $1 to $2"
}

# Begins a run in SAVE, or goes on there, with the flags given; gives its exit code.
train() {
    local word from
    require SAVE "the folder of the checkpoints"
    from=(--load "$SAVE")
    for word in "$@"; do
        case $word in
            --save | --save=* | --load | --load=* | --finetune | --reset-progress)
                fail "leave ${word%%=*} out: the run is kept in the folder SAVE, and begins with the" \
                    "weights of the one in BASE if these variables are set" ;;
        esac
    done
    check_shared "$SAVE"
    if [[ -n ${BASE:-} ]] && ! compgen -G "$SAVE/global_step*/manifest.json" > /dev/null; then
        from=(--load "$BASE" --finetune)
    fi
    ranks "$REPOSITORY/${TRAIN:-pretrain_gpt.py}" "$@" \
        "${from[@]}" --save "$SAVE" --kill-switch-path "${KILL_SWITCH:-$SAVE/stop}"
}

# Like train, and puts the job back into the queue if the run was stopped before its end.
train_and_requeue() {
    local code=0
    train "$@" || code=$?
    if ((code == 75)); then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    return "$code"
}
