# Sourced by the scripts of this folder. What they share is said by variables:
#
#   REPOSITORY   folder of this repository, which all nodes see (where sbatch was typed)
#   MODULES      environment modules that are loaded first, such as "cuda/12.4 gcc/12"
#   CONTAINER    image in which the processes run: started by srun where it has pyxis, otherwise by
#                Apptainer or Singularity
#   MOUNTS       folders that the container sees, at the same paths, besides REPOSITORY, the working
#                directory, SAVE, BASE and that of KILL_SWITCH: those of the data, for example
#   PYTHON       the Python that has requirements.txt, at the same place on all nodes or in the
#                container (python)
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

load_modules() {
    [[ -n ${MODULES:-} ]] || return 0
    type module > /dev/null 2>&1 ||
        fail "MODULES is \"$MODULES\", but $(hostname) has no command module: submit the job from a" \
            "login shell that has it, or leave MODULES out"
    local name
    set +u # modules use variables that may be unset
    for name in $MODULES; do
        module load "$name" ||
            fail "module load $name: $(hostname) cannot load it; correct MODULES (module avail)"
    done
    set -u
}

# Sets container_step, which srun gets, and container_command, which it runs, from CONTAINER.
find_container() {
    container_step=() container_command=()
    [[ -n ${CONTAINER:-} ]] || return 0
    local folder folders=("$REPOSITORY" "$PWD") mounts="" program
    for folder in ${MOUNTS:-}; do
        [[ -d $folder ]] || fail "MOUNTS: $(hostname) has no folder $folder"
        folders+=("$folder")
    done
    for folder in "${SAVE:-}" "${BASE:-}" "${KILL_SWITCH:+${KILL_SWITCH%/*}}"; do
        [[ ! -d $folder ]] || folders+=("$folder") # BASE may be a URL
    done
    for folder in "${folders[@]}"; do
        folder=$(cd "$folder" && pwd)
        [[ ,$mounts, == *",$folder:$folder,"* ]] || mounts+=${mounts:+,}$folder:$folder
    done
    if [[ $(srun --help) == *--container-image* ]]; then
        container_step=(--container-image "$CONTAINER" --container-mounts "$mounts"
            --container-workdir "$PWD")
        return
    fi
    for program in apptainer singularity; do
        if type -P "$program" > /dev/null; then
            container_command=("$program" exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER")
            return
        fi
    done
    fail "CONTAINER is \"$CONTAINER\", but srun has no pyxis, and $(hostname) neither apptainer nor" \
        "singularity: load a module that has one with MODULES, or leave CONTAINER out"
}

load_modules

# Runs SCRIPT FLAG… once for each task of the job; gives the highest exit code among them. Each finds
# its rank, and where all meet, in SLURM's variables.
ranks() {
    local container_step container_command
    find_container
    # srun is not told by itself how many cores a task has.
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
        export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    fi
    # Neighbours share a node. The first to leave with 75 must not have the others killed, who may
    # still save.
    srun --distribution=block --kill-on-bad-exit=0 --wait="${GRACE_S:-600}" \
        "${container_step[@]}" "${container_command[@]}" "$PYTHON" "$@"
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
