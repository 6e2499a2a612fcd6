#!/usr/bin/env bash
# Prove on one GPU, in at most ten minutes, that training and generation are right, and how fast.
#
#   bash tests/gpu/prove.sh
#   bash tests/gpu/prove.sh --json results.json --parts training runs
#   bash tests/gpu/prove.sh --rehearse
#
# Without a GPU it is a rehearsal: the same checks on tiny networks on the CPU; what needs a GPU is
# listed as not run. Results go to results.json (--json), and to $OUT when it is set. PYTHON names
# the interpreter, whose packages are those of the project and pytest. Compiled kernels are kept in
# a temporary folder, and no network is needed. The exit code is 1 if a check fails.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export TMPDIR=$scratch TRITON_CACHE_DIR=$scratch/triton TORCHINDUCTOR_CACHE_DIR=$scratch/inductor
"${PYTHON:-python3}" tests/gpu/prove.py "$@"
