#!/usr/bin/env bash
# Everything that is checked: lint, types and tests. Arguments go to pytest; `quick` stands for the
# tests of what changes break most: imports, flags, plans, file formats, training, a job of two ranks.
#
#   bash tests/run.sh
#   bash tests/run.sh quick
#   bash tests/run.sh tests/unit -k tokenizer
#
# VENV and PYTHON say where packages are installed, and with which Python: see tools/venv.sh.
# REQUIREMENTS names the files that list them (requirements.lock: the versions in it, by their hashes).
# TEST_PROCESSES says how many run tests at once; a test of ranks starts up to 4 more.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/venv.sh
read -ra requirements <<< "${REQUIREMENTS:-requirements.lock}"
use_python "${requirements[@]}"
# Hundreds of processes import the same modules, and compile them each time where this is set.
unset PYTHONDONTWRITEBYTECODE

quick=(
    tests/architecture
    tests/golden
    tests/unit/config
    tests/unit/engine/test_data_parallel_engine.py
    tests/end_to_end/test_data_groups.py
)
if [[ ${1:-} == quick ]]; then
    set -- "${quick[@]}" "${@:2}"
fi

failed=()

check() {
    run "${@:2}" || failed+=("$1")
}

check lint ruff check
check format ruff format --check
check types mypy
check spelling codespell
# More processes than cores, for many tests wait for ranks and jobs; a file's tests share what it has
# prepared, and stay together. In the order of their names, the files of few long tests come first,
# and none is alone at the end. A test that hangs takes its process along (see pyproject.toml), and is
# tried once more.
check tests python -m pytest -n "${TEST_PROCESSES:-3}" --dist loadfile --no-loadscope-reorder \
    --max-worker-restart 1 "$@"

if ((${#failed[@]})); then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
echo "PASSED: lint, format, types, spelling, tests"
