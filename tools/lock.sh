#!/usr/bin/env bash
# Writes both ends of the ranges in the requirements files. Needs uv.
#
#   bash tools/lock.sh [--upgrade]
#
# requirements.lock         the newest versions of all packages, with hashes, for every supported Python
# requirements-lowest.txt   the oldest versions that the ranges permit, for Python 3.11 on Linux
#
# The lock leaves out torch and what its GPU builds need of CUDA: the right build depends on the
# machine. requirements-torch.txt has its version, to which the rest of the lock is resolved.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cuda=(cuda-{bindings,pathfinder,toolkit}
    nvidia-{cublas,cuda-cupti,cuda-nvrtc,cuda-runtime,cudnn-cu13,cufft,cufile,curand,cusolver}
    nvidia-{cusparse,cusparselt-cu13,nccl-cu13,nvjitlink,nvshmem-cu13,nvtx}
    nvidia-{cublas,cuda-cupti,cuda-nvrtc,cuda-runtime,cudnn,cufft,cufile,curand,cusolver}-cu12
    nvidia-{cusparse,cusparselt,nccl,nvjitlink,nvshmem,nvtx}-cu12)

resolve() {
    uv pip compile --quiet --custom-compile-command "bash tools/lock.sh" "$@" \
        "${cuda[@]/#/--no-emit-package=}" \
        requirements.txt requirements-server.txt requirements-eval.txt requirements-docs.txt \
        requirements-dev.txt
}

resolve "$@" --universal --python-version 3.10 --generate-hashes \
    --constraint requirements-torch.txt --no-emit-package torch --output-file requirements.lock
resolve "$@" --resolution lowest-direct --python-version 3.11 --python-platform linux \
    --no-annotate --output-file requirements-lowest.txt
