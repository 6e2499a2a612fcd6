#!/usr/bin/env bash
# Collect the packages of prove.sh for a machine without a network that has torch and transformers.
#
#   bash tests/gpu/wheels.sh
#   PYTHON_VERSION=3.11 bash tests/gpu/wheels.sh FOLDER
#
# Writes wheels for Linux on x86-64 (about 30 MB) to FOLDER, .whl by default, from where prove.sh
# installs them; PYTHON_VERSION is that of the machine with the GPU. Not collected: torch, triton,
# numpy, transformers and what these need.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

folder=${1:-.whl}
mkdir -p "$folder/peers"
versions=$(mktemp)
trap 'rm -f "$versions"' EXIT
sed -n 's/ *\\$//; /^[a-z0-9].*==/p' requirements.lock >"$versions" # without the hashes
options=(--quiet --no-deps --only-binary=:all: --implementation cp)
options+=(--python-version "${PYTHON_VERSION:-3.12}" --constraint "$versions")
for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  options+=(--platform "${platform}_x86_64")
done
python3 -m pip download "${options[@]}" --dest "$folder" --requirement tests/gpu/wheels.txt
# Released as source only; the wheel is the same on every machine.
DS_BUILD_OPS=0 python3 -m pip wheel --quiet --no-deps --constraint "$versions" \
  --wheel-dir "$folder" deepspeed
# In a folder of their own: megatron-core's package has the name of this project's.
python3 -m pip download "${options[@]}" --dest "$folder/peers" \
  megatron-core==0.19.2 liger-kernel==0.8.5
du -sh "$folder"
