#!/usr/bin/env bash
# Prove on one GPU that training and generation are right, how fast they are and where time goes.
#
#   bash tests/gpu/prove.sh                      # all parts, each within ten minutes
#   bash tests/gpu/prove.sh right --budget 300   # one part, in at most 300 seconds
#   bash tests/gpu/prove.sh --rehearse           # on the CPU
#
# Parts: right compares with the CPU, fast times training, where lists the kernels of a step, peers
# times other programs beside this one. Each writes PART.json to $OUT, or to gpu_results/ (--out).
# Without a GPU it is a rehearsal: tiny networks on the CPU; what needs a GPU is listed as not run.
# The exit code is 1 if a check fails, 2 if packages are missing.
#
# No network is needed. PYTHON names the interpreter; the wheels of .whl (tests/gpu/wheels.sh) are
# installed for it, outside of its environment ($PROVE_WHEELS: another folder). They and compiled kernels stay in $PROVE_CACHE for
# the next command.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
cache=${PROVE_CACHE:-${TMPDIR:-/tmp}/prove-cache-$UID}
mkdir -p "$cache"
wheels=${PROVE_WHEELS:-.whl}
if compgen -G "$wheels/*.whl" >/dev/null; then
  for part in . peers; do
    compgen -G "$wheels/$part/*.whl" >/dev/null || continue
    site=$cache/site/$part
    if ! diff -q <(ls "$wheels/$part"/*.whl) "$site/wheels" >/dev/null 2>&1; then
      "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" "$wheels/$part"/*.whl
      ls "$wheels/$part"/*.whl >"$site/wheels"
    fi
  done
  # Peers last: megatron-core has the name of this project.
  export PYTHONPATH=$cache/site${PYTHONPATH:+:$PYTHONPATH}:$cache/site/peers
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TMPDIR=$scratch TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor
export TORCHINDUCTOR_COMPILE_THREADS=${TORCHINDUCTOR_COMPILE_THREADS:-4}
"$python" tests/gpu/prove.py "$@"
